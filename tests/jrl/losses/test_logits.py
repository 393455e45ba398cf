"""Functions of logits: chunks, derivatives of both orders, memory."""

import functools
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import compiled, jitted
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tiers import full_but

import jrl

SHAPE, VOCAB = (2, 3), 7
TOKENS = np.array([[0, 3, 6], [2, 2, 1]], np.int32)
ROWS = np.array([[True, False, True], [True, True, False]])


def logits_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(0, 3, (*SHAPE, VOCAB)), draw.normal(0, 3, (*SHAPE, VOCAB))


def plain(logits, reference, tokens, names):
    """Some of the five by the log-softmax, with the derivatives that jax finds."""
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    m = jnp.logaddexp(jnp.log(BETA) + q, jnp.log(1 - BETA) + p)
    result = {
        "entropy": -jnp.sum(jnp.exp(p) * p, axis=-1),
        "logprobs": jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0],
        "policy||reference": jnp.sum(jnp.exp(p) * (p - q), axis=-1),
        "reference||policy": jnp.sum(jnp.exp(q) * (q - p), axis=-1),
        "jsd": jnp.sum(BETA * jnp.exp(q) * (q - m) + (1 - BETA) * jnp.exp(p) * (p - m), axis=-1),
    }
    return {name: result[name] for name in names}


NAMES = ("entropy", "logprobs", "policy||reference", "reference||policy", "jsd")
BETA = 0.3


def ours(logits, reference, tokens, mask=None, chunk_size=None, names=NAMES):
    """All five of the library, or some."""

    def one(name):
        if name == "entropy":
            return jrl.entropy_from_logits(logits, mask, chunk_size=chunk_size)
        if name == "logprobs":
            return jrl.logprobs_from_logits(logits, tokens, mask, chunk_size=chunk_size)
        if name == "jsd":
            return jrl.jsd_from_logits(logits, reference, mask, beta=BETA, chunk_size=chunk_size)
        return jrl.kl_from_logits(logits, reference, mask, direction=name, chunk_size=chunk_size)

    return {name: one(name) for name in names}


CHUNKS = (None, 1, 3, 7, 100)


@functools.cache
def with_derivatives(call, chunk_size=None, masked=False):
    """Values, their gradients, and the products of second derivatives with a direction."""
    settings = {} if call is plain else {"chunk_size": chunk_size}
    if masked:
        settings["mask"] = ROWS

    def one(name, logits, reference):
        return call(logits, reference, TOKENS, names=(name,), **settings)[name]

    @jax.jit
    def everything(logits, reference, direction):
        result = {}
        for name in NAMES:
            slope = jax.grad(lambda z, name=name: jnp.sum(jnp.sin(one(name, z, reference))))
            result[name] = (
                one(name, logits, reference),
                jax.jvp(slope, (logits,), (direction,)),
                jax.jvp(lambda z, name=name: one(name, z, reference), (logits,), (direction,)),
            )
        return result

    return everything


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_logits_functions_equal_log_softmax_to_second_order(chunk_size):
    with jax.enable_x64(True):
        for seed in range(3):
            logits, reference = logits_of(seed)
            arrays = logits, reference, logits_of(seed + 9)[0]
            chex.assert_trees_all_close(
                with_derivatives(ours, chunk_size)(*arrays),
                with_derivatives(plain)(*arrays),
                rtol=1e-10,
                atol=1e-12,
            )


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", full_but([None, 3], 3))
def test_logits_functions_mask_rows(chunk_size):
    with jax.enable_x64(True):
        logits, reference = logits_of(5)
        hidden = np.where(ROWS[..., None], logits, np.nan)
        direction = np.ones_like(logits)
        arrays = (
            hidden,
            np.where(ROWS[..., None], reference, np.inf),
            np.where(ROWS[..., None], direction, np.nan),
        )
        full = with_derivatives(ours, chunk_size)(logits, reference, direction)
        masked = with_derivatives(ours, chunk_size, masked=True)(*arrays)

        def check(actual, expected):
            rows = ROWS[..., None] if actual.ndim > 2 else ROWS
            expected = np.where(rows, expected, 0)
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)

        jax.tree.map(check, masked, full)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_functions_masked_second_derivatives(name):
    def total(logits):
        return jnp.sum(jnp.sin(ours(logits, reference, TOKENS, ROWS, names=(name,))[name]))

    logits, reference = logits_of(6)
    reference = np.where(ROWS[..., None], reference, np.nan)
    hidden = np.where(ROWS[..., None], logits, np.nan)
    twice = jax.jit(jax.grad(lambda z: jnp.sum(jax.grad(total)(z) ** 2)))
    np.testing.assert_allclose(twice(hidden), np.where(ROWS[..., None], twice(logits), 0))


# `plain` has second derivatives too, which others are compared with.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_functions_finite_differences(name):
    with jax.enable_x64(True):
        logits, reference = logits_of(1)
        call = jax.jit(lambda z: ours(z, reference, TOKENS, chunk_size=3, names=(name,))[name])
        check_grads(call, (logits / 3,), order=2)


@pytest.mark.slow
@pytest.mark.parametrize("impossible", full_but([{3}, {0, 1, 2, 6}], {0, 1, 2, 6}))
def test_logits_functions_of_impossible_tokens(impossible):
    logits, reference = logits_of(6)
    possible = [v for v in range(VOCAB) if v not in impossible]
    logits[..., sorted(impossible)] = reference[..., sorted(impossible)] = -np.inf
    tokens = np.full(SHAPE, possible[0], np.int32)
    with jax.enable_x64(True):

        @functools.partial(jax.jit, static_argnums=3)
        def slopes(logits, reference, tokens, chunk_size):
            def total(z):
                actual = ours(z, reference, tokens, chunk_size=chunk_size)
                return sum(jnp.sum(x) for x in actual.values()), actual

            return jax.grad(total, has_aux=True)(logits)

        rest = (logits[..., possible], reference[..., possible], np.zeros_like(tokens))
        expected, values = slopes(*rest, None)
        for chunk_size in (None, 2):
            actual, same = slopes(logits, reference, tokens, chunk_size)
            np.testing.assert_allclose(actual[..., possible], expected, rtol=1e-9, atol=1e-11)
            assert not np.any(actual[..., sorted(impossible)])
            chex.assert_trees_all_close(same, values, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_kl_from_logits_of_tokens_of_one_policy(chunk_size):
    both, one = np.float32([0, 1, 2]), np.float32([0, 1, -np.inf])
    inputs = {"chunk_size": chunk_size}
    finite = ((one, both, "policy||reference"), (both, one, "reference||policy"))

    @jax.jit
    def everything(one, both):
        forward = functools.partial(jrl.kl_from_logits, **inputs)
        reverse = functools.partial(forward, direction="reference||policy")
        of_token = jax.value_and_grad(lambda z, token: jrl.logprobs_from_logits(z, token, **inputs))
        return {
            "finite": (
                jax.value_and_grad(forward)(one, both),
                jax.value_and_grad(reverse)(both, one),
            ),
            "infinite": (forward(both, one), reverse(one, both)),
            "impossible": of_token(one, jnp.array(2))[0],
            "possible": of_token(one, jnp.array(0))[1],
        }

    actual = everything(one, both)
    for (p, q, direction), (value, slope) in zip(finite, actual["finite"], strict=True):
        expected, slopes = oracles.kl_divergence(p.tolist(), q.tolist(), direction)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(slope, slopes, atol=1e-6)
    assert actual["infinite"] == (np.inf, np.inf)
    assert actual["impossible"] == -np.inf
    np.testing.assert_allclose(actual["possible"], [0.731059, -0.731059, 0], atol=1e-6)


def test_kl_from_logits_of_underflowing_probabilities():
    policy, reference = np.array([0.0, -1000.0]), np.array([0.0, -np.inf])
    assert jitted.kl_from_logits(policy, reference) == 0


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_kl_from_logits_of_near_policies(chunk_size):
    logits, _ = logits_of(2)
    divergence = jax.jit(functools.partial(jrl.kl_from_logits, chunk_size=chunk_size))
    for size in (1e-2, 1e-3):
        near = logits + size * logits_of(3)[0]
        exact = np.array(
            [[oracles.kl_divergence(*z)[0] for z in zip(*rows, strict=True)]
             for rows in zip(logits, near, strict=True)]
        )  # fmt: skip
        arrays = (np.asarray(x, np.float32) for x in (logits, near))
        result = divergence(*arrays)
        # A sum of p log(p / q) in float32 would be off by 1e-7, as large as the smallest of these.
        np.testing.assert_allclose(result, exact, rtol=5e-3)
    same = np.asarray(logits, np.float32)
    assert np.all(divergence(same, same) >= 0)


@pytest.mark.slow
def test_logits_functions_far_from_zero():
    for chunk_size in (None, 1):
        shifted = np.array([1e4, 1e4 + 1])
        entropy = jitted.entropy_from_logits(shifted, chunk_size=chunk_size)
        np.testing.assert_allclose(entropy, oracles.entropy([0, 1]), rtol=1e-6)
        far = np.array([-300.0, 300.0, 0.0])
        kl = jitted.kl_from_logits(far, -far, chunk_size=chunk_size)
        np.testing.assert_allclose(kl, 600, rtol=1e-6)
        slope = compiled(jax.grad(jrl.kl_from_logits))(far, -far, chunk_size=chunk_size)
        np.testing.assert_allclose(slope, np.zeros(3), atol=1e-6)


def test_kl_from_logits_reference_has_no_gradient():
    logits, reference = logits_of(4)
    for direction in get_args(jrl.KLDirection):
        slope = jax.jit(
            jax.grad(lambda r, d=direction: jnp.sum(jrl.kl_from_logits(logits, r, direction=d)))
        )
        assert not np.any(slope(reference))


MEASURED = [
    (backward, dtype, name)
    for backward in (False, True)
    for dtype in (np.float32, jnp.bfloat16)
    for name in NAMES
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backward", "dtype", "name"),
    MEASURED,
)
def test_logits_chunks_take_little_memory(name, dtype, backward):
    # The terms of a mixture take six arrays of a chunk, in float32.
    rows, vocab, chunk_size = (4, 16), 8000, 501 if name == "jsd" else 1001

    def temporary(chunk_size):
        def call(logits, reference, tokens, mask):
            return jnp.sum(ours(logits, reference, tokens, mask, chunk_size, (name,))[name])

        shapes = (
            jax.ShapeDtypeStruct((*rows, vocab), dtype),
            jax.ShapeDtypeStruct((*rows, vocab), dtype),
            jax.ShapeDtypeStruct(rows, jnp.int32),
            jax.ShapeDtypeStruct(rows, bool),
        )
        program = jax.jit(jax.grad(call) if backward else call).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    size = rows[0] * rows[1] * vocab * jnp.dtype(dtype).itemsize

    assert temporary(chunk_size) < size


@pytest.mark.slow
def test_logits_functions_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    draw = np.random.default_rng(0)
    logits = np.asarray(draw.normal(0, 2, (16, 4, VOCAB)), np.float32)
    reference, theta = logits[..., ::-1] / 2, np.asarray(draw.normal(0, 1, VOCAB), np.float32)
    tokens = np.asarray(draw.integers(0, VOCAB, (16, 4)), np.int32)
    mask = np.asarray(draw.integers(0, 2, (16, 4)), bool)

    def total(theta, logits, reference, tokens, mask):
        logits = logits + jnp.broadcast_to(theta, logits.shape)
        result = ours(logits, reference, tokens, mask, chunk_size=3)
        return sum(jnp.sum(jnp.sin(x)) for x in result.values())

    def local(*arrays):
        value, slope = jax.value_and_grad(total)(*arrays)
        # The gradient of the shared parameters is already summed: its type says so.
        return jax.lax.psum(value, "data"), slope

    rows = P("data")
    cut = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), *[rows] * 4), out_specs=(P(), P()))
    )
    arrays = (theta, logits, reference, tokens, mask)
    chex.assert_trees_all_close(
        cut(*arrays), jax.jit(jax.value_and_grad(total))(*arrays), rtol=1e-5, atol=1e-5
    )
