"""Attention against numpy loops: norm, rotation, masks, grouped heads and the whole layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh

from moe.attention import core as flash
from moe.attention.blocked import read_in_blocks
from moe.attention.layer import attention
from moe.attention.plain import causal, read_values
from moe.attention.rotary import YarnScaling, rope
from moe.config import ModelConfig
from moe.precision import rms_norm
from moe.weights import Attention

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 3, 5, 6, 2, 4, 7
VALID = np.arange(TIME)[None, :] >= np.array([0, 2, 5])[:, None]
"""No padding, two padded columns, nothing but padding."""


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def oracle_norm(row, scale, epsilon):
    row = np.asarray(row, np.float64)
    return row / np.sqrt(np.mean(row**2) + epsilon) * scale


def oracle_rope(x, position, base):
    """Each pair of the head as a complex number, turned."""
    x = np.asarray(x, np.float64)
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    turned = pairs * np.exp(1j * position * base ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def oracle_read(query, key, value, visible):
    """One query head over the positions it sees, in float64."""
    scores = [
        float(query @ key[s]) / np.sqrt(len(query)) if visible[s] else -np.inf
        for s in range(len(key))
    ]
    powers = np.exp(np.array(scores) - max(scores))
    return (powers / powers.sum()) @ np.asarray(value, np.float64)


def test_rms_norm():
    x, scale = normal(0, 3, D_MODEL), normal(1, D_MODEL)
    out = rms_norm(jnp.asarray(x), jnp.asarray(scale), 0.5)
    for row in range(3):
        np.testing.assert_allclose(out[row], oracle_norm(x[row], scale, 0.5), rtol=2e-6, atol=1e-7)


def test_rms_norm_of_half_precision_is_taken_in_float32():
    x = jnp.asarray(300 * normal(0, 3, D_MODEL), jnp.bfloat16)
    scale = jnp.asarray(normal(1, D_MODEL))
    out = rms_norm(x, scale, 1e-6)
    assert out.dtype == jnp.bfloat16
    wide = rms_norm(x.astype(jnp.float32), scale, 1e-6)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    assert np.all(np.isfinite(rms_norm(jnp.zeros((1, D_MODEL)), scale, 1e-6)))


def test_rope_turns_pairs():
    x, positions = normal(0, 6, 2, HEAD_DIM), np.array([0, 1, 2, 7, 7, 30])
    out = rope(jnp.asarray(x), jnp.asarray(positions), 100.0)
    np.testing.assert_array_equal(out[0], x[0])
    for token, position in enumerate(positions):
        for head in range(2):
            expected = oracle_rope(x[token, head], position, 100.0)
            # Angles up to 30 radians in float32: 2e-6.
            np.testing.assert_allclose(out[token, head], expected, atol=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 99))
def test_rope_products_depend_on_the_distance_alone(first, second, shift, seed):
    query, key = (jnp.asarray(normal(seed + n, 1, 1, 6)) for n in (0, 100))

    def product(q_position, k_position):
        turned = [
            rope(x, jnp.asarray([position]), 50.0)
            for x, position in ((query, q_position), (key, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    # Positions up to 400 have angles with an error of 400 * 6e-8, on products of order 6.
    expected = product(first, second)
    assert abs(product(first + shift, second + shift) - expected) < 5e-4
    turned = rope(query, jnp.asarray([first]), 50.0)
    np.testing.assert_allclose(jnp.linalg.norm(turned), jnp.linalg.norm(query), rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 16)])
def test_the_gradient_of_rope_is_that_of_its_linear_map(interleaved, scaling):
    x, pull = (jnp.asarray(normal(seed, 3, 2, HEAD_DIM)) for seed in (0, 1))
    positions = jnp.array([0, 3, 11])

    def turned(x):
        return rope(x, positions, 100.0, scaling, interleaved)

    (slope,) = jax.vjp(turned, x)[1](pull)
    # A linear map's columns are its values at the unit vectors; no gradient is involved.
    units = jnp.eye(x.size).reshape(x.size, *x.shape)
    expected = jnp.sum(jax.lax.map(turned, units) * pull[None], axis=(1, 2, 3)).reshape(x.shape)
    np.testing.assert_allclose(slope, expected, atol=1e-5)


def test_causal_sees_earlier_tokens_that_are_not_padding():
    visible = np.asarray(causal(jnp.asarray(VALID)))
    for row in range(BATCH):
        for t in range(TIME):
            expected = [VALID[row, s] and s <= t for s in range(TIME)]
            assert visible[row, t].tolist() == expected


def test_read_values_reads_grouped_heads():
    query = normal(0, BATCH, TIME, HEADS, HEAD_DIM)
    key, value = (normal(seed, BATCH, TIME, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    visible = causal(jnp.asarray(VALID))
    read = read_values(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), visible)
    out = np.asarray(read)
    for row in range(BATCH):
        for t in range(TIME):
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                read = out[row, t, head]
                if not VALID[row, t]:
                    # What padding reads is its own business, as long as it is finite and bounded.
                    assert np.all(np.abs(read) <= np.abs(value[row, :, kv]).max() + 1e-6)
                    continue
                expected = oracle_read(
                    query[row, t, head], key[row, :, kv], value[row, :, kv], visible[row, t]
                )
                np.testing.assert_allclose(read, expected, atol=2e-6)


def test_read_values_has_finite_gradients_at_padding():
    query = jnp.asarray(normal(0, BATCH, TIME, HEADS, HEAD_DIM))
    key, value = (jnp.asarray(normal(n, BATCH, TIME, KV_HEADS, HEAD_DIM)) for n in (1, 2))

    def total(query, key, value):
        read = read_values(query, key, value, causal(jnp.asarray(VALID)))
        return jnp.sum(jnp.where(jnp.asarray(VALID)[..., None, None], read, 0.0))

    gradients = jit(jax.grad(total, argnums=(0, 1, 2)))(query, key, value)
    padding = ~VALID
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(np.asarray(gradient)[padding], 0)


def test_read_values_for_one_query_against_a_longer_cache():
    """Decoding: one query a row, more keys than queries, holes where nothing is written yet."""
    query = normal(0, BATCH, 1, HEADS, HEAD_DIM)
    key, value = (normal(seed, BATCH, 9, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    visible = np.random.default_rng(3).random((BATCH, 1, 9)) < 0.5
    out = read_values(*map(jnp.asarray, (query, key, value, visible)))
    for row in range(BATCH):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            expected = oracle_read(
                query[row, 0, head], key[row, :, kv], value[row, :, kv], visible[row, 0]
            )
            np.testing.assert_allclose(out[row, 0, head], expected, atol=2e-6)


def attention_in_float64(query, key, value, visible, pull):
    """What is read, and the gradients of query, key and value for `pull`; one key/value head for
    each query head."""
    query, key, value, pull = (np.asarray(x, np.float64) for x in (query, key, value, pull))
    scale = query.shape[-1] ** -0.5
    scores = np.einsum("bthk,bshk->bhts", query, key) * scale
    powers = np.where(visible[:, None], np.exp(scores), 0.0)
    p = powers / powers.sum(axis=-1, keepdims=True)
    read = np.einsum("bhts,bshk->bthk", p, value)
    slopes = np.einsum("bthk,bshk->bhts", pull, value)
    slopes = p * (slopes - np.einsum("bthk,bthk->bht", read, pull)[..., None]) * scale
    of_query = np.einsum("bhts,bshk->bthk", slopes, key)
    of_key = np.einsum("bhts,bthk->bshk", slopes, query)
    return read, of_query, of_key, np.einsum("bhts,bthk->bshk", p, pull)


@pytest.mark.parametrize("name", ["plain", "xla", "one query of a cache"])
def test_half_precision_errs_as_little_as_in_blocks(name):
    """Scores of a dozen or more, which half precision would round by several hundredths."""
    source, head_dim, heads = 32, 16, 3
    time = 1 if name == "one query of a cache" else source
    sizes = (4.0, time), (1.0, source), (1.0, source), (1.0, time)
    *given, pull = (
        jnp.asarray(scale * normal(n, BATCH, size, heads, head_dim), jnp.bfloat16)
        for n, (scale, size) in enumerate(sizes)
    )
    visible = np.tri(source, dtype=bool)[None, -time:].repeat(BATCH, axis=0)
    expected = attention_in_float64(*given, visible, pull)

    def errors(read):
        @jit
        def all_of(*given):
            out, back = jax.vjp(lambda *given: read(*given, jnp.asarray(visible)), *given)
            return out, *back(pull)

        # JAX's own implementation promotes its weights.
        with jax.numpy_dtype_promotion("standard"):
            found = all_of(*given)
        assert all(x.dtype == jnp.bfloat16 for x in found)
        return np.array(
            [
                np.sqrt(np.mean((np.asarray(x, np.float64) - wanted) ** 2))
                for x, wanted in zip(found, expected, strict=True)
            ]
        )

    own = read_values if time == 1 else partial(flash.read, implementation=name)
    # Both round weights and results once, but blocks round them before they are normalised, when
    # the largest is 1 and has no error. Of the gradients a fifth more or less is chance.
    assert np.all(errors(own) < [1.8, 1.2, 1.2, 1.2] * errors(read_in_blocks))


@pytest.mark.parametrize("layout", ["dp1", "tp2"])
def test_the_whole_layer(layout):
    config = ModelConfig(
        vocab_size=3,
        d_model=D_MODEL,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_base=100.0,
    )
    weights = Attention(
        norm=normal(0, D_MODEL),
        query=normal(1, D_MODEL, HEADS, HEAD_DIM),
        key=normal(2, D_MODEL, KV_HEADS, HEAD_DIM),
        value=normal(3, D_MODEL, KV_HEADS, HEAD_DIM),
        out=normal(4, HEADS, HEAD_DIM, D_MODEL),
    )
    x = normal(5, 2 * TIME, D_MODEL)
    valid, positions = VALID[:2], np.array([0, 1, 2, 3, 4, 0, 0, 0, 1, 2])
    mesh = mesh_of(layout)
    heads = P(None, mesh.tp)
    spec = Attention(norm=P(), query=heads, key=heads, value=heads, out=P(mesh.tp))

    def local(weights, x):
        def attend(query, key, value):
            shape = (2, TIME, -1, HEAD_DIM)
            key, value = key.reshape(shape), value.reshape(shape)
            read = read_values(query.reshape(shape), key, value, causal(jnp.asarray(valid)))
            return read.reshape(query.shape)

        return attention(weights, x, jnp.asarray(positions), attend, config, mesh)

    out = on_mesh(local, mesh, (spec, P(mesh.tp)), P(mesh.tp))(
        jax.tree.map(jnp.asarray, weights), jnp.asarray(x)
    )
    h = np.stack([oracle_norm(row, weights.norm, config.norm_epsilon) for row in x])
    query, key, value = (
        np.einsum("nd,dhk->nhk", h, w) for w in (weights.query, weights.key, weights.value)
    )
    for rotated in (query, key):
        for token in range(len(x)):
            for head in range(rotated.shape[1]):
                rotated[token, head] = oracle_rope(rotated[token, head], positions[token], 100.0)
    for token in range(len(x)):
        row, t = divmod(token, TIME)
        if not valid[row, t]:
            assert np.all(np.isfinite(out[token]))
            continue
        own = slice(row * TIME, (row + 1) * TIME)
        expected = np.zeros(D_MODEL)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            visible = [valid[row, s] and s <= t for s in range(TIME)]
            read = oracle_read(query[token, head], key[own, kv], value[own, kv], visible)
            expected += read @ weights.out[head]
        # Sums of 24 products of order 10.
        np.testing.assert_allclose(out[token], expected, rtol=1e-5, atol=3e-5)
