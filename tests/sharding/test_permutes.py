"""The walk over traced programs that finds permutes which some devices leave out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from permutes import check_permutes, unreached_permutes


def traced(function, check_vma=True):
    mesh = jax.make_mesh((2, 2), ("stage", "ring"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("stage", "ring"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.make_jaxpr(mapped)(jnp.zeros(4)).jaxpr


def turn(x):
    return lax.ppermute(x, "ring", [(0, 1), (1, 0)])


def own_stage(x):
    return lax.cond(lax.axis_index("stage") == 0, turn, lambda x: x, x)


def own_values(x):
    return lax.cond(x[0] > 0, turn, lambda x: x, x)


def own_times(x):
    return lax.while_loop(lambda x: x[0] < 3, lambda x: turn(x) + 1, x)


def inside_what_is_alike(x):
    return lax.scan(
        lambda x, tick: (lax.cond(tick > 0, own_stage, turn, x), None), x, jnp.arange(3)
    )[0]


def in_a_function(x):
    return jax.checkpoint(jax.jit(own_stage))(x)


@pytest.mark.parametrize(
    "function", [own_stage, own_values, own_times, inside_what_is_alike, in_a_function]
)
def test_unreached_permutes_are_found(function):
    assert len(list(unreached_permutes(traced(function)))) == 1
    with pytest.raises(AssertionError, match="1 permutes that some devices may leave out"):
        check_permutes(traced(function))


def alike(x):
    even = lax.scan(
        lambda x, tick: (lax.cond(tick > 0, turn, lambda x: x, x), None), x, jnp.arange(3)
    )
    total = lax.psum(x[0], ("stage", "ring"))
    return turn(lax.cond(total > 0, turn, lambda x: x, even[0]))


def groups(x):
    def gathered(x):
        return lax.all_gather(x, "ring").sum(0)

    return lax.cond(lax.axis_index("stage") == 0, gathered, lambda x: x, x)


@pytest.mark.parametrize("function", [alike, groups])
def test_check_permutes_accepts_uniform_control_flow(function):
    check_permutes(traced(function))


@pytest.mark.parametrize("function", [own_stage, own_values, own_times])
def test_unreached_permutes_without_varying_types(function):
    assert len(list(unreached_permutes(traced(function, check_vma=False)))) == 1
    check_permutes(traced(turn, check_vma=False))
