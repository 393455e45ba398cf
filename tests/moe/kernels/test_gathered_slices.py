"""Products of rows from anywhere, or to anywhere: simulated, against those of a copy; what each
thread copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import simulates_transposes
from tiers import full_but

from benchmarks.kernel_cases import GATHERED, PRODUCTS, sources
from moe.kernels import grouped
from moe.kernels.grouped import Tiling
from moe.kernels.slices import chunks_of_thread
from moe.kernels.swiglu import hidden_gradients, hidden_units

KERNEL = "custom_call @mosaic_gpu_v2"
SMALL = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)
TILINGS = {"small": SMALL, "as it is": Tiling()}
QUICK = "fewer rows than a tile"


def operands(product):
    """Tokens, NaN in the one of no group, which is whose, that as a copy, and numbers."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(GATHERED, product.inner))
    x[-1] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    source = jnp.asarray(sources(product))
    rows = x.at[source].get(mode="fill", fill_value=0)
    return x, source, rows, draw, jnp.asarray(product.sizes, jnp.int32)


def numbers(draw, *shape):
    return jnp.asarray(draw.normal(size=shape), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("tiling", full_but(TILINGS, "small"))
@pytest.mark.parametrize("name", full_but(PRODUCTS, QUICK))
def test_a_product_of_gathered_rows_is_that_of_their_copy(name, tiling):
    product = PRODUCTS[name]
    x, source, rows, draw, sizes = operands(product)
    weights = numbers(draw, len(product.sizes), product.inner, product.outer)
    options = {"tiling": TILINGS[tiling], "simulated": True}
    found = grouped.multiply_rows(0, x, weights, sizes, source=source, **options)
    np.testing.assert_array_equal(found, grouped.multiply_rows(0, rows, weights, sizes, **options))


@simulates_transposes
@pytest.mark.parametrize("name", full_but(PRODUCTS, QUICK))
def test_sums_over_gathered_rows_are_those_over_their_copy(name):
    product = PRODUCTS[name]
    x, source, rows, draw, sizes = operands(product)
    pull = numbers(draw, len(source), product.outer).at[sum(product.sizes) :].set(jnp.nan)
    options = {"tiling": SMALL, "simulated": True}
    found = grouped.sum_products(x, pull, sizes, source=source, **options)
    np.testing.assert_array_equal(found, grouped.sum_products(rows, pull, sizes, **options))


@simulates_transposes
@pytest.mark.parametrize("name", full_but(["uneven, some empty", "none at all", QUICK], QUICK))
def test_sums_with_what_is_gathered_on_the_right_are_those_with_its_copy(name):
    product = PRODUCTS[name]
    pull, source, rows, draw, sizes = operands(product)
    hidden = numbers(draw, len(source), product.outer).at[sum(product.sizes) :].set(jnp.nan)
    options = {"tiling": SMALL, "simulated": True}
    found = grouped.sum_products(hidden, pull, sizes, source=source, gathered=1, **options)
    np.testing.assert_array_equal(found, grouped.sum_products(hidden, rows, sizes, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(PRODUCTS, QUICK))
def test_rows_of_a_product_are_written_each_to_its_place(name):
    """Every fifth nowhere, and those of no group to none of the places of others."""
    product = PRODUCTS[name]
    _, source, rows, draw, sizes = operands(product)
    weights = numbers(draw, len(product.sizes), product.inner, product.outer)
    room = len(source) + 7
    place = draw.permutation(room)[: len(source)]
    place[4::5] = room + draw.integers(0, 3, len(place[4::5]))
    options = {"tiling": SMALL if name == QUICK else Tiling(), "simulated": True}
    to = {"destination": jnp.asarray(place, jnp.int32), "num_results": room}
    found = grouped.multiply_rows(0, rows, weights, sizes, **to, **options)
    assert found.shape == (room, product.outer)
    expected = np.asarray(grouped.multiply_rows(0, rows, weights, sizes, **options))
    known = place < room
    np.testing.assert_array_equal(np.asarray(found)[place[known]], expected[known])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_hidden_units_of_gathered_rows_are_those_of_their_copy(name):
    product = PRODUCTS[name]
    x, source, rows, draw, sizes = operands(product)
    gate_up = numbers(draw, len(product.sizes), product.inner, 2 * product.outer)
    probs = jnp.asarray(draw.random(len(source)), jnp.float32)
    options = {"tiling": SMALL, "simulated": True}
    found = hidden_units(x, gate_up, probs, sizes, source=source, **options)
    expected = hidden_units(rows, gate_up, probs, sizes, **options)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@simulates_transposes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven, some empty", QUICK])
def test_gradients_of_hidden_units_from_gathered_rows_are_those_from_their_copy(name):
    product = PRODUCTS[name]
    pull, source, rows, draw, sizes = operands(product)
    down = numbers(draw, len(product.sizes), product.outer, product.inner)
    inward = numbers(draw, len(source), 2 * product.outer)
    probs = jnp.asarray(draw.random(len(source)), jnp.float32)
    options = {"tiling": SMALL, "simulated": True}
    found = hidden_gradients(pull, down, inward, probs, sizes, source=source, **options)
    expected = hidden_gradients(rows, down, inward, probs, sizes, **options)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("height", "width"), [(128, 64), (64, 128), (128, 128), (64, 64)])
def test_threads_copy_a_tile_once_to_where_its_swizzle_has_it(height, width):
    """Tiles of 8 x 64 numbers row by row; then bits 4 to 6 of each byte's address meet bits 7 to 9,
    as CUTLASS' ``Swizzle<3, 4, 3>`` says."""
    tiled = np.arange(height * width).reshape(height // 8, width // 64, 8, 64)
    at = np.empty((height, width), int)
    at[:] = tiled.transpose(0, 2, 1, 3).reshape(height, width)
    address = 2 * at
    address ^= (address >> 7 & 7) << 4
    found = np.full((height, width), -1)
    for thread in range(128):
        for row, column, place in chunks_of_thread(thread, height, width):
            assert (found[row, column : column + 8] == -1).all()
            found[row, column : column + 8] = place + np.arange(8)
    np.testing.assert_array_equal(2 * found, address)


SHAPES = {
    "small": (70, 300, 128, 192, 5),
    "Qwen3-30B-A3B": (32768, 262144, 2048, 768, 128),
    "DeepSeek-V3": (16384, 131072, 7168, 2048, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_each_is_one_kernel_on_cuda_and_no_row_is_copied_for_it(name):
    tokens, slots, inner, outer, groups = SHAPES[name]

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(x, weights, gate_up, pull, probs, source, sizes, down, inward):
        return (
            grouped.multiply_rows(0, x, weights, sizes, source=source),
            grouped.sum_products(x, pull, sizes, source=source),
            hidden_units(x, gate_up, probs, sizes, source=source),
            grouped.sum_products(pull, x, sizes, source=source, gathered=1),
            hidden_gradients(x, down, inward, probs, sizes, source=source),
        )

    text = jax.export.export(jax.jit(run), platforms=["cuda"])(
        shaped(tokens, inner),
        shaped(groups, inner, outer),
        shaped(groups, inner, 2 * outer),
        shaped(slots, outer),
        shaped(slots, dtype=jnp.float32),
        shaped(slots, dtype=jnp.int32),
        shaped(groups, dtype=jnp.int32),
        shaped(groups, outer, inner),
        shaped(slots, 2 * outer),
    ).mlir_module()
    assert text.count(KERNEL) == 5
    assert f"tensor<{slots}x{inner}xbf16>" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_product_that_writes_rows_to_their_places_is_one_kernel_on_cuda(name):
    _, slots, inner, outer, groups = SHAPES[name]
    results = slots + 8

    def run(hidden, down, by_inward, gate_up, place, sizes):
        to = {"destination": place, "num_results": results}
        return (
            grouped.multiply_rows(0, hidden, down, sizes, **to),
            grouped.multiply_rows(1, by_inward, gate_up, sizes, **to),
        )

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    text = jax.export.export(jax.jit(run), platforms=["cuda"])(
        shaped(slots, outer),
        shaped(groups, outer, inner),
        shaped(slots, 2 * outer),
        shaped(groups, inner, 2 * outer),
        shaped(slots, dtype=jnp.int32),
        shaped(groups, dtype=jnp.int32),
    ).mlir_module()
    assert text.count(KERNEL) == 2
    assert f"tensor<{slots}x{inner}xbf16>" not in text
