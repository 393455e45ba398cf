"""Sorted positions: a search on a CPU, and one comparison of all pairs for other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.ops.sorting import group_of_rows, positions_in, sort_by_group

ASCENDING = np.int32([0, 2, 2, 2, 7, 9])
VALUES = np.int32([-1, 0, 1, 2, 3, 7, 8, 9, 10])


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_are_those_of_numpy(side):
    found = positions_in(jnp.asarray(ASCENDING), jnp.asarray(VALUES), side)
    np.testing.assert_array_equal(found, np.searchsorted(ASCENDING, VALUES, side))
    compared = jnp.searchsorted(ASCENDING, VALUES, side=side, method="compare_all")
    np.testing.assert_array_equal(found, compared)


def test_rows_past_the_sizes_have_no_group():
    groups = group_of_rows(jnp.asarray([2, 0, 1], jnp.int32), 5)
    np.testing.assert_array_equal(groups, [0, 0, 2, 3, 3])


def test_a_search_is_a_loop_on_a_cpu_alone():
    sort = jax.jit(sort_by_group, static_argnums=1)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    for platform, loops in (("cpu", 1), ("cuda", 0), ("tpu", 0)):
        text = jax.export.export(sort, platforms=[platform])(ids, 4).mlir_module()
        found = text.count("stablehlo.while") - text.count("func.func private @chlo.scan.impl")
        assert found == loops
