"""Rows of batches on the mesh, taken without the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.recipes import Batch
from jrl.rollout.batching import over_rows, take_rows
from jrl.rollout.resharding import rollout_mesh
from sharding.folding import Layout, fold


def batch_on(mesh, first):
    rows = jnp.arange(first, first + 8, dtype=jnp.int32)
    tokens, mask = jnp.tile(rows[:, None], (1, 5)), jnp.ones((8, 5), bool)
    return jax.device_put(Batch(tokens, mask, mask, truncated=rows > 3), over_rows(mesh))


# Where the rollout has other axes over the same devices, rows lie on four ranks in place of two.
@pytest.mark.parametrize("layout", ["dp1", "tp2 dp2 cp2 / ep8", "tp2 dp2 cp2 / ep4", "pp2 dp2"])
def test_rows_of_several_batches_move_to_the_mesh_of_training(layout):
    layout = Layout.parse(layout)
    training = fold(layout, jax.devices()[: layout.num_devices])
    rollout = rollout_mesh(None, training)
    rows = np.array([15, 0, 8, 7, 3, 3, 12, 9])
    found = take_rows([batch_on(rollout, 0), batch_on(rollout, 8)], rows, training)
    assert found.tokens.sharding.is_equivalent_to(over_rows(training), 2)
    np.testing.assert_array_equal(found.tokens, np.tile(rows[:, None], (1, 5)))
    np.testing.assert_array_equal(found.truncated, rows > 3)
    assert found.advantages is None
