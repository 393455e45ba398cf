"""The grouped product's kernels, simulated, against a product in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from simulator import simulates_transposes
from tiers import full_but

from benchmarks.kernel_cases import PRODUCTS, TILINGS
from moe.experts import grouped_dot as dot
from moe.experts.grouped_dot import grouped_dot
from moe.kernels import choice, grouped
from moe.kernels.grouped import SMALL_TILING, TILING, Tiling, plan_tiles, tiling_of

KERNEL = "custom_call @mosaic_gpu_v2"
SMALL = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)


def operands(product, dtype=jnp.bfloat16):
    """Rows, matrices and what pulls at the results; NaN in rows of no group."""
    draw = np.random.default_rng(0)
    known, groups = sum(product.sizes), len(product.sizes)
    rows, pull = (
        draw.normal(size=(known + product.rest, width)) for width in (product.inner, product.outer)
    )
    rows[known:], pull[known:] = np.nan, np.nan
    weights = draw.normal(size=(groups, product.inner, product.outer))
    sizes = jnp.asarray(product.sizes, jnp.int32)
    return *(jnp.asarray(x, dtype) for x in (rows, weights, pull)), sizes


def looped(rows, weights, pull, sizes):
    """The product, the gradient of its rows and the gradient of its matrices, in float64."""
    rows, weights, pull = (np.asarray(x, np.float64) for x in (rows, weights, pull))
    out, by_rows = np.zeros(pull.shape), np.zeros(rows.shape)
    by_weights, start = np.zeros(weights.shape), 0
    for group, size in enumerate(sizes.tolist()):
        mine = slice(start, start + size)
        out[mine], by_rows[mine] = rows[mine] @ weights[group], pull[mine] @ weights[group].T
        by_weights[group] = rows[mine].T @ pull[mine]
        start += size
    return out, by_rows, by_weights


def close(found, expected, dtype):
    """Sums of a few hundred products of order one, then rounded to the dtype's bits."""
    rounding = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11}.get(dtype, 1e-6)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rounding, atol=3e-4)


@pytest.mark.parametrize("dtype", full_but([jnp.bfloat16, jnp.float16], jnp.bfloat16))
@pytest.mark.parametrize("name", full_but(PRODUCTS, "fewer rows than a tile"))
def test_products_equal_float64(name, dtype):
    rows, weights, pull, sizes = operands(PRODUCTS[name], dtype)
    tiling = SMALL if sum(PRODUCTS[name].sizes) < 64 else Tiling()
    out = grouped.multiply_rows(0, rows, weights, sizes, tiling=tiling, simulated=True)
    close(out, looped(rows, weights, pull, sizes)[0], dtype)


@simulates_transposes
@pytest.mark.parametrize("name", full_but(PRODUCTS, "fewer rows than a tile"))
def test_both_gradients_equal_float64(name):
    rows, weights, pull, sizes = operands(PRODUCTS[name])
    options = {"tiling": SMALL, "simulated": True}
    _, by_rows, by_weights = looped(rows, weights, pull, sizes)
    close(grouped.multiply_rows(1, pull, weights, sizes, **options), by_rows, jnp.bfloat16)
    found = grouped.sum_products(rows, pull, sizes, **options)
    assert found.dtype == jnp.float32
    close(found, by_weights, jnp.float32)
    rounded = grouped.sum_products(rows, pull, sizes, dtype=jnp.bfloat16, **options)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, found.astype(jnp.bfloat16))


compiled_tiles = jit(plan_tiles, static_argnums=(1, 2))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 90), min_size=5, max_size=5))
def test_tiles_cover_each_row_once_with_its_own_group(cuts):
    num_rows, height = 90, 16
    sizes = np.diff(sorted(cuts), prepend=0).tolist()
    tiles = compiled_tiles(jnp.asarray(sizes, jnp.int32), num_rows, height)
    found = [None] * num_rows
    for group, block, first, size in zip(*(x.tolist() for x in tiles), strict=True):
        assert not size or (first >= 0 and first + size <= height)
        for row in range(block * height + first, block * height + first + size):
            assert found[row] is None
            found[row] = group
    expected = [group for group, size in enumerate(sizes) for _ in range(size)]
    assert found == expected + [len(sizes)] * (num_rows - sum(sizes))


def exported(function, *arguments):
    return jax.export.export(jax.jit(function), platforms=["cuda"])(*arguments).mlir_module()


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradients(rows, weights, pull, sizes, implementation="mosaic"):
    out, back = jax.vjp(
        lambda *of: grouped_dot(*of, sizes, implementation=implementation), rows, weights
    )
    return out, *back(pull)


SHAPES = {
    "small": (300, 128, 192, 5),
    "Qwen3-30B-A3B": (262144, 2048, 768, 128),
    "DeepSeek-V3": (131072, 7168, 1024, 256),
    "Mixtral-like": (8192, 4096, 14336, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(SHAPES, "small"))
def test_the_product_and_both_gradients_are_kernels_on_cuda(name):
    rows, inner, outer, groups = SHAPES[name]
    text = exported(
        with_gradients,
        shaped(rows, inner),
        shaped(groups, inner, outer, dtype=jnp.float32),
        shaped(rows, outer),
        shaped(groups, dtype=jnp.int32),
    )
    assert text.count(KERNEL) == 3
    assert "stablehlo.dot_general" not in text
    # No matrix is copied for a block of rows.
    assert f"tensor<{groups}x{inner}x{outer}xbf16>" in text
    copies = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert not any("bf16" in line for line in copies)


def test_gradient_of_bfloat16_matrices_is_not_converted_on_cuda():
    rows, inner, outer, groups = SHAPES["small"]
    of_rows = shaped(rows, inner), shaped(groups, inner, outer), shaped(rows, outer)
    text = exported(with_gradients, *of_rows, shaped(groups, dtype=jnp.int32))
    assert f"tensor<{groups}x{inner}x{outer}xbf16>" in text
    assert f"tensor<{groups}x{inner}x{outer}xf32>" not in text


@pytest.mark.slow
@pytest.mark.parametrize("changed", TILINGS, ids=str)
def test_every_tiling_that_is_compared_is_lowered(changed):
    options = {"tiling": Tiling()._replace(**changed)}
    rows, inner, outer, groups = SHAPES["Qwen3-30B-A3B"]
    x, pull, sizes = shaped(rows, inner), shaped(rows, outer), shaped(groups, dtype=jnp.int32)

    def run(x, weights, pull, sizes):
        return (
            grouped.multiply_rows(0, x, weights, sizes, **options),
            grouped.multiply_rows(1, pull, weights, sizes, **options),
            grouped.sum_products(x, pull, sizes, **options),
        )

    assert exported(run, x, shaped(groups, inner, outer), pull, sizes).count(KERNEL) == 3


@pytest.mark.slow
def test_kernels_are_lowered_inside_a_mesh_and_gradients_are_summed_over_it():
    mesh = mesh_of("dp4 / ep2")

    def pulled(rows, weights, sizes):
        out = grouped_dot(rows, weights, sizes, implementation="mosaic")
        return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), mesh.axes)

    specs = (P(mesh.axes), P(mesh.ep), P(mesh.axes))
    sharded = jax.shard_map(pulled, mesh=mesh.mesh, in_specs=specs, out_specs=P())
    text = exported(
        jax.grad(sharded, argnums=(0, 1)),
        shaped(4 * 128, 64),
        shaped(2 * 3, 64, 128),
        shaped(4 * 3, dtype=jnp.int32),
    )
    # Neither gradient needs the product itself. The matrices' is summed over those that share them.
    assert text.count(KERNEL) == 2
    assert "stablehlo.all_reduce" in text


@pytest.mark.slow
def test_the_kernel_is_asked_for_by_name_and_serves_hopper_alone(monkeypatch):
    of = shaped(72, 64), shaped(2, 64, 64), shaped(2, dtype=jnp.int32)

    def kernels(name):
        return exported(lambda *of: grouped_dot(*of, implementation=name), *of).count(KERNEL)

    for capability in (0.0, 9.0):
        monkeypatch.setattr(choice, "capability", lambda capability=capability: capability)
        assert (kernels(None), kernels("mosaic")) == (0, 1)
    for capability in (8.0, 10.0):
        monkeypatch.setattr(choice, "capability", lambda capability=capability: capability)
        with pytest.raises(ValueError, match=rf"capability {capability} \(needs 9.0, Hopper"):
            kernels("mosaic")


def test_grouped_kernel_rejects_unsupported_operands():
    def product(rows, weights):
        return grouped_dot(rows, weights, jnp.ones(2, jnp.int32), implementation="mosaic")

    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for rows, weights, message in (
        (
            jax.ShapeDtypeStruct((8, 64), jnp.float32),
            half((2, 64, 64)),
            r"rows of float32 \(needs bfloat16 or float16",
        ),
        (half((8, 96)), half((2, 96, 64)), r"matrices of 96 x 64 \(both must be multiples of"),
        (half((8, 64)), half((2, 64, 100)), r"matrices of 64 x 100"),
        (half((8, 64)), half((2, 64, 64)), r"runs on NVIDIA GPUs .* lowered for cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.jit(product).lower(rows, weights)


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(choice, "capability", lambda: 8.0)
    half = partial(jnp.ones, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"does not support GPUs of capability 8.0 .* Hopper"):
        dot.IMPLEMENTATIONS["mosaic"].multiply_rows(
            0, half((8, 64)), half((2, 64, 64)), jnp.ones(2, jnp.int32)
        )


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [
        (2048, 128, SMALL_TILING),
        (8192, 128, SMALL_TILING),
        (8193, 128, TILING),
        (64, 1, SMALL_TILING),
    ],
)
def test_tiling_of_few_rows_is_small(rows, groups, expected):
    assert tiling_of(rows, groups) == expected
