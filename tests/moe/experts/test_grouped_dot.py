"""Each grouped product against the plain twin, and the plain twin against a loop over rows."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of

from moe.experts.grouped_dot import IMPLEMENTATIONS, grouped_dot

# More rows than the larger tile, so that both are used; a group may be all of them or none.
ROWS, GROUPS, INNER, OUTER = 300, 5, 6, 7
SIZES = {
    "uneven": [3, 0, 197, 40, 60],
    "empty": [0, 0, 0, 0, 0],
    "all in one": [0, 300, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, 300],
    "rows of no group": [31, 33, 0, 1, 32],
    "ends at tiles": [256, 32, 0, 12, 0],
}
# The kernels need a GPU: tests/moe/kernels/test_grouped_kernels.py.
NAMES = [None, *(name for name in IMPLEMENTATIONS if name not in ("plain", "mosaic"))]


def operands(dtype=np.float32):
    draw = np.random.default_rng(0)
    shapes = {"rows": (ROWS, INNER), "weights": (GROUPS, INNER, OUTER), "pull": (ROWS, OUTER)}
    return [draw.normal(size=shape).astype(dtype) for shape in shapes.values()]


@cache
def compiled(name):
    def run(rows, weights, pull, sizes):
        out, back = jax.vjp(
            lambda rows, weights: grouped_dot(rows, weights, sizes, implementation=name),
            rows,
            weights,
        )
        return out, *back(pull)

    return jit(run)


def product(name, rows, weights, pull, sizes):
    given = rows, weights, pull, np.asarray(sizes, np.int32)
    return jax.device_get(compiled(name)(*given))


def looped(rows, weights, pull, sizes):
    """The product and its gradients, row by row in float64."""
    rows, weights, pull = (np.asarray(x, np.float64) for x in (rows, weights, pull))
    out, by_rows, by_weights = np.zeros_like(pull), np.zeros_like(rows), np.zeros_like(weights)
    row = 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            out[row] = rows[row] @ weights[group]
            by_rows[row] = weights[group] @ pull[row]
            by_weights[group] += np.outer(rows[row], pull[row])
            row += 1
    return out, by_rows, by_weights


def close(found, expected, rows=ROWS):
    """float32 sums of up to seven products of order one, and of `rows` in the last."""
    for x, y, terms in zip(found, expected, (INNER, OUTER, rows), strict=True):
        np.testing.assert_allclose(x, y, atol=4e-7 * terms, rtol=1e-5)


def loops_and_products(text):
    """Numbers of loops and of products of a lowered program."""
    # Cumulative sums have one in what stands for them where XLA has no kernel.
    loops = text.count("stablehlo.while") - text.count("func.func private @chlo.scan.impl")
    return loops, text.count("stablehlo.dot_general")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_plain_twin_equals_a_loop_over_rows(sizes):
    close(product("plain", *operands(), sizes), looped(*operands(), sizes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_and_gradients_equal_the_plain_twin(name, sizes):
    found = product(name, *operands(), sizes)
    close(found, product("plain", *operands(), sizes))
    out, by_rows, by_weights = found
    assert not out[sum(sizes) :].any() and not by_rows[sum(sizes) :].any()
    assert not by_weights[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
def test_products_equal_the_plain_twin_on_any_sizes(name, cuts):
    sizes = np.diff(sorted(cuts), prepend=0)
    close(product(name, *operands(), sizes), product("plain", *operands(), sizes))


@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_rows_of_no_group_reach_nothing(name):
    rows, weights, pull = operands()
    sizes = SIZES["rows of no group"]
    known = sum(sizes)
    finite = product(name, rows, weights, pull, sizes)
    rows[known:], pull[known:] = np.nan, np.inf
    holes = product(name, rows, weights, pull, sizes)
    jax.tree.map(np.testing.assert_array_equal, holes, finite)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_bfloat16_is_summed_in_float32(name):
    rows, weights, pull = operands(jnp.bfloat16)
    # Weights stay float32, their values ones that bfloat16 has, as do the sums' terms.
    exact = [x.astype(np.float32) for x in (rows, weights, pull)]
    sizes = SIZES["uneven"]
    found = product(name, rows, exact[1], pull, sizes)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    out, by_rows, by_weights = product("plain", *exact, sizes)
    # Results over rows are rounded once, to eight bits; the sums over 197 rows are not.
    for x, y in zip(found[:2], (out, by_rows), strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=2**-8, atol=4e-6)
    np.testing.assert_allclose(found[2], by_weights, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_device_multiplies_its_rows_by_its_matrices(name):
    """On two by two devices, the matrices shared by the pairs that hold the same ones."""
    mesh = mesh_of("dp4 / ep2")
    draw = np.random.default_rng(1)
    rows, pull = draw.normal(size=(4 * 40, INNER)), draw.normal(size=(4 * 40, OUTER))
    weights = draw.normal(size=(2 * GROUPS, INNER, OUTER))
    sizes = draw.integers(0, 8, (4, GROUPS))
    arrays = [x.astype(np.float32) for x in (rows, weights, pull)]

    def pulled(rows, weights, pull, sizes):
        out = grouped_dot(rows, weights, sizes[0], implementation=name)
        return jax.lax.psum(jnp.sum(out * pull), mesh.axes)

    sharded = jax.shard_map(
        pulled,
        mesh=mesh.mesh,
        in_specs=(P(mesh.axes), P(mesh.ep), P(mesh.axes), P(mesh.axes)),
        out_specs=P(),
    )
    gradients = jit(jax.grad(sharded, argnums=(0, 1)))(*arrays, sizes.astype(np.int32))
    by_rows, by_weights = jax.device_get(gradients)
    expected = np.zeros_like(weights)
    for device in range(4):
        mine = slice(40 * device, 40 * (device + 1))
        # ep varies fastest: odd devices hold the second half of the matrices.
        held = slice(GROUPS * (device % 2), GROUPS * (device % 2 + 1))
        _, of_rows, of_weights = looped(rows[mine], weights[held], pull[mine], sizes[device])
        np.testing.assert_allclose(by_rows[mine], of_rows, atol=4e-6)
        expected[held] += of_weights
    np.testing.assert_allclose(by_weights, expected, atol=2e-5)


@pytest.mark.slow
def test_columns_may_be_several_axes():
    """Bit for bit the product with them made one, which is not what is kept; the gradient is in the
    shape and the dtype of what is given."""
    rows, weights, _ = operands(jnp.bfloat16)
    wide = np.stack([weights, weights], axis=2).astype(np.float32) * np.float32([[1], [2]])
    pull = np.random.default_rng(2).normal(size=(ROWS, 2 * OUTER)).astype(jnp.bfloat16)

    @jit
    def run(rows, weights):
        sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
        out, back = jax.vjp(lambda *given: grouped_dot(*given, sizes), rows, weights)
        return out, *back(pull)

    out, by_rows, by_weights = jax.device_get(run(rows, wide))
    expected = jax.device_get(run(rows, wide.reshape(GROUPS, INNER, -1)))
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(by_rows, expected[1])
    assert (by_weights.shape, by_weights.dtype) == (wide.shape, wide.dtype)
    np.testing.assert_array_equal(by_weights, expected[2].reshape(wide.shape))


@pytest.mark.slow
def test_fewer_rows_than_a_tile():
    rows, weights, pull = operands()
    arrays = rows[:5], weights, pull[:5]
    for name in NAMES:
        close(product(name, *arrays, [2, 0, 1, 1, 0]), looped(*arrays, [2, 0, 1, 1, 0]))


@pytest.mark.slow
def test_products_are_lowered_for_accelerators_without_one():
    """What runs on a TPU are the blocks, and on a GPU the batched products: one of each kind before
    the loop, and one in it."""
    arguments = [*operands(), np.asarray(SIZES["uneven"], np.int32)]

    def lowered(name, platform):
        program = jax.export.export(compiled(name), platforms=[platform])(*arguments)
        return loops_and_products(program.mlir_module())

    assert lowered(None, "tpu") == lowered("blocks", "tpu") != lowered("tiles", "tpu")
    assert lowered(None, "cuda") == lowered("batched", "cuda") == (3, 6)
    assert lowered(None, "cpu") == lowered("tiles", "cpu")


def test_groups_of_few_rows_are_one_product_without_a_loop():
    """As in decoding: the caller says how many rows a group has at most."""
    rows, weights, pull = operands()
    sizes = np.asarray(SIZES["rows of no group"], np.int32)
    few = partial(grouped_dot, implementation="batched", most=40)

    @jit
    def run(rows, weights, pull, sizes):
        out, back = jax.vjp(lambda rows, weights: few(rows, weights, sizes), rows, weights)
        return out, *back(pull)

    found = jax.device_get(run(rows, weights, pull, sizes))
    close(found, looped(rows, weights, pull, sizes))
    text = jax.export.export(run, platforms=["cuda"])(rows, weights, pull, sizes).mlir_module()
    assert loops_and_products(text) == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_no_product_copies_a_matrix_for_each_block_of_rows(platform):
    """At the shape of Qwen3-235B-A22B on eight devices with a half more than even routing: nothing
    is larger than the matrices in float32, their gradient."""
    rows, groups, inner, outer = 12_288, 16, 4096, 3072
    arguments = [
        jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups, inner, outer), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, outer), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ]
    program = jax.export.export(compiled(None), platforms=[platform])(*arguments).mlir_module()
    width = {"bf16": 2, "f32": 4}
    largest = max(
        math.prod(int(size) for size in shape.strip("x").split("x")) * width[kind]
        for shape, kind in re.findall(r"tensor<((?:\d+x)+)(bf16|f32)>", program)
    )
    assert largest == 4 * groups * inner * outer


def test_unknown_implementations_are_refused():
    with pytest.raises(
        ValueError, match=r"implementation=.ragged. of grouped_dot is not known: .*'tiles'"
    ):
        product("ragged", *operands(), SIZES["uneven"])
