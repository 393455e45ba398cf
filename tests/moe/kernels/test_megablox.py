"""The grouped product on TPUs: JAX's kernels, interpreted, against float64, and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from tiers import full_but

from benchmarks.kernel_cases import PRODUCTS
from moe.experts.grouped_dot import grouped_dot
from moe.kernels import megablox

KERNEL = "custom_call @tpu_custom_call"
NAMED = {
    **PRODUCTS,
    # Several tiles of each dimension, the last ones narrower.
    "large": PRODUCTS["uneven, some empty"]._replace(inner=1536, outer=1088),
}


def operands(product, dtype):
    """Rows, matrices and what pulls at the results; NaN in rows of no group."""
    draw = np.random.default_rng(0)
    known, groups = sum(product.sizes), len(product.sizes)
    rows, pull = (
        draw.normal(size=(known + product.rest, width)) for width in (product.inner, product.outer)
    )
    rows[known:], pull[known:] = np.nan, np.nan
    weights = draw.normal(size=(groups, product.inner, product.outer))
    sizes = np.asarray(product.sizes, np.int32)
    return *(np.asarray(x, dtype) for x in (rows, weights, pull)), sizes


def looped(rows, weights, pull, sizes):
    """The product, the gradient of its rows, and that of its matrices, in float64."""
    rows, weights, pull = (np.asarray(x, np.float64) for x in (rows, weights, pull))
    out, by_rows, by_weights = np.zeros(pull.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    stops = np.cumsum(sizes)
    for group, (stop, size) in enumerate(zip(stops, sizes, strict=True)):
        mine = slice(stop - size, stop)
        out[mine], by_rows[mine] = rows[mine] @ weights[group], pull[mine] @ weights[group].T
        by_weights[group] = rows[mine].T @ pull[mine]
    return out, by_rows, by_weights


@pytest.mark.parametrize("dtype", full_but([jnp.bfloat16, jnp.float32], jnp.bfloat16))
@pytest.mark.parametrize("name", full_but(NAMED, "uneven, some empty"))
def test_products_and_gradients_equal_float64(name, dtype):
    rows, weights, pull, sizes = operands(NAMED[name], dtype)

    @jit
    def run(rows, weights, pull, sizes):
        named = {"interpreted": True}
        return (
            megablox.multiply_rows(0, rows, weights, sizes, **named),
            megablox.multiply_rows(1, pull, weights, sizes, **named),
            megablox.sum_products(rows, pull, sizes, **named),
        )

    found = run(rows, weights, pull, sizes)
    assert [x.dtype for x in found] == [dtype, dtype, jnp.float32]
    rounding = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    expected = looped(rows, weights, pull, sizes)
    # float32 sums of up to 1536 products of order one, two of which are rounded once.
    for x, y, by in zip(found, expected, (rounding, rounding, 1e-5), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=by, atol=1e-3)


def lowered(platform, *shapes):
    def run(rows, weights, pull, sizes):
        out, back = jax.vjp(
            lambda *of: grouped_dot(*of, sizes, implementation="megablox"), rows, weights
        )
        return out, *back(pull)

    return jax.export.export(jax.jit(run), platforms=[platform])(*shapes).mlir_module()


SHAPES = {"small": (300, 128, 192, 5), "Qwen3-30B-A3B": (262144, 2048, 768, 128)}


@pytest.mark.parametrize("name", full_but(SHAPES, "small"))
def test_the_product_and_both_gradients_are_kernels_on_a_tpu_alone(name):
    rows, inner, outer, groups = SHAPES[name]
    shapes = [
        jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups, inner, outer), jnp.float32),
        jax.ShapeDtypeStruct((rows, outer), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ]
    text = lowered("tpu", *shapes)
    assert text.count(KERNEL) == 3
    assert "stablehlo.dot_general" not in text
    for platform in ("cpu", "cuda"):
        with pytest.raises(
            ValueError, match=rf"megablox.* runs on TPUs, .* lowered for {platform}"
        ):
            lowered(platform, *shapes)


@pytest.mark.slow
def test_kernels_are_lowered_inside_a_mesh_and_gradients_are_summed_over_it():
    mesh = mesh_of("dp4 / ep2")

    def pulled(rows, weights, sizes):
        out = grouped_dot(rows, weights, sizes, implementation="megablox")
        return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), mesh.axes)

    specs = (P(mesh.axes), P(mesh.ep), P(mesh.axes))
    sharded = jax.shard_map(pulled, mesh=mesh.mesh, in_specs=specs, out_specs=P())
    exported = jax.export.export(jax.jit(jax.grad(sharded, argnums=(0, 1))), platforms=["tpu"])
    text = exported(
        jax.ShapeDtypeStruct((4 * 128, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((2 * 3, 64, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * 3,), jnp.int32),
    ).mlir_module()
    # Neither gradient needs the product itself. The matrices' is summed over those that share them.
    assert text.count(KERNEL) == 2
    assert "stablehlo.all_reduce" in text


@pytest.mark.parametrize(
    ("dtype", "product", "total"),
    [
        (jnp.bfloat16, (512, 1024, 1024), (512, 512, 1024)),
        (jnp.float32, (512, 512, 1024), (512, 512, 512)),
    ],
    ids=["bfloat16", "float32"],
)
def test_tiles_fit_the_vmem_of_every_tpu(dtype, product, total):
    rows = jax.ShapeDtypeStruct((32768, 2048), dtype)
    assert megablox.product_tiling(rows, 1536) == product
    assert megablox.sum_tiling(rows, 1536) == total
    # Narrow matrices are one tile, whatever their width.
    narrow = jax.ShapeDtypeStruct((256, 192), dtype)
    assert megablox.product_tiling(narrow, 320) == megablox.sum_tiling(narrow, 320)
    assert megablox.sum_tiling(narrow, 320) == (256, 192, 320)
