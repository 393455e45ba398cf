"""Lowers kernels for CUDA on a machine that has no GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of
from tiers import full_but

from moe.experts.permutation import permute_rows, unpermute_rows
from moe.kernels.layout import SortedLayout, sorted_layout

KERNEL = "custom_call @mosaic_gpu_v2"


def module(function, *arguments):
    return jax.export.export(jax.jit(function), platforms=["cuda"])(*arguments).mlir_module()


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def layout_of(tokens, k, slots, experts=4):
    integers = [shaped(*shape, dtype=jnp.int32) for shape in ((slots,), (tokens, k), (experts,))]
    return SortedLayout(*integers)


SIZES = [(70, 3, 5), (512, 8, 256)]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "k", "experts"), full_but(SIZES, SIZES[0]))
def test_the_layout_is_two_kernels(tokens, k, experts):
    def run(ids):
        return sorted_layout(ids, experts, implementation="mosaic")

    text = module(run, shaped(tokens, k, dtype=jnp.int32))
    assert text.count(KERNEL) == 2
    assert "stablehlo.sort" not in text
    # Profiles and the compiler's reports show the names of kernels.
    assert "count_assignments" in text and "place_assignments" in text


def permute(x, layout, implementation):
    return permute_rows(x, layout.tokens, layout.slots, implementation=implementation)


def unpermute(rows, layout, implementation):
    return unpermute_rows(rows, layout.slots, layout.tokens, implementation)


WIDTHS = [128, 384, 2048, 7168]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", full_but([jnp.bfloat16, jnp.float32], jnp.bfloat16))
@pytest.mark.parametrize("width", full_but(WIDTHS, 384))
def test_permute_and_unpermute_are_kernels_forward_and_backward(width, dtype):
    tokens, k, slots = 70, 8, 600
    x, rows = shaped(tokens, width, dtype=dtype), shaped(slots, width, dtype=dtype)
    layout = layout_of(tokens, k, slots)

    def run(x, rows, layout):
        there, back_there = jax.vjp(lambda x: permute(x, layout, "mosaic"), x)
        home, back_home = jax.vjp(lambda rows: unpermute(rows, layout, "mosaic"), rows)
        return there, *back_there(rows), home, *back_home(x.astype(jnp.float32))

    text = module(run, x, rows, layout)
    # Each way forward and backward.
    assert text.count(KERNEL) == 4
    assert "stablehlo.scatter" not in text and "stablehlo.gather" not in text


def test_the_kernel_is_asked_for_by_name():
    operands = shaped(16, 128), layout_of(16, 2, 40)

    def lowered(name):
        program = jax.jit(lambda x, layout: permute(x, layout, name))
        return jax.export.export(program, platforms=["cuda"])(*operands).mlir_module()

    assert lowered("mosaic").count(KERNEL) == 1
    assert KERNEL not in lowered(None) and "stablehlo.gather" in lowered(None)


def test_kernels_are_lowered_inside_a_mesh_and_gradients_are_summed_over_it():
    """What is the same on all devices has the sum of their gradients."""
    mesh = mesh_of("dp4 / ep2")
    tokens, k, slots = 16, 2, 40
    layout = jax.tree.map(
        lambda x: shaped(4 * x.shape[0], *x.shape[1:], dtype=x.dtype), layout_of(tokens, k, slots)
    )

    def pulled(x, layout):
        rows = permute(x, layout, "mosaic")
        back = unpermute(rows, layout, "mosaic")
        return jax.lax.psum(jnp.sum(back.astype(jnp.float32)), mesh.axes)

    sharded = jax.shard_map(pulled, mesh=mesh.mesh, in_specs=(P(), P(mesh.axes)), out_specs=P())
    exported = jax.export.export(jax.jit(jax.grad(sharded)), platforms=["cuda"])(
        shaped(tokens, 128), layout
    )
    text = exported.mlir_module()
    # The value itself is not wanted: what is computed are the gradients, from the layout alone.
    assert text.count(KERNEL) >= 2
    assert "stablehlo.all_reduce" in text
