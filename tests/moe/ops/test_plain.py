"""Attention with all scores at once against numpy loops: masks, grouped heads, half precision."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit
from references import causal_mask

from moe.attention import core
from moe.attention.blocked import BLOCKED
from moe.ops.attention import flash_attention, plain_attention
from moe.ops.mask import Mask, TokenIndices

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 3, 5, 6, 2, 4, 7
VALID = np.arange(TIME)[None, :] >= np.array([0, 2, 5])[:, None]
"""No padding, two padded columns, nothing but padding."""


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def oracle_read(query, key, value, visible):
    """One query head over the positions it sees, in float64."""
    scores = [
        float(query @ key[s]) / np.sqrt(len(query)) if visible[s] else -np.inf
        for s in range(len(key))
    ]
    powers = np.exp(np.array(scores) - max(scores))
    return (powers / powers.sum()) @ np.asarray(value, np.float64)


def test_causal_sees_earlier_tokens_that_are_not_padding():
    visible = np.asarray(jit(causal_mask)(VALID))
    for row in range(BATCH):
        for t in range(TIME):
            expected = [VALID[row, s] and s <= t for s in range(TIME)]
            assert visible[row, t].tolist() == expected


def test_plain_attention_groups_heads():
    query = normal(0, BATCH, TIME, HEADS, HEAD_DIM)
    key, value = (normal(seed, BATCH, TIME, KV_HEADS, HEAD_DIM) for seed in (1, 2))

    @jit
    def attend(query, key, value, valid):
        visible = causal_mask(valid)
        return plain_attention(query, key, value, visible), visible

    out, visible = jax.device_get(attend(query, key, value, VALID))
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


def test_plain_attention_has_finite_gradients_at_padding():
    query = normal(0, BATCH, TIME, HEADS, HEAD_DIM)
    key, value = (normal(n, BATCH, TIME, KV_HEADS, HEAD_DIM) for n in (1, 2))

    def total(query, key, value):
        read = plain_attention(query, key, value, causal_mask(jnp.asarray(VALID)))
        return jnp.sum(jnp.where(jnp.asarray(VALID)[..., None, None], read, 0.0))

    gradients = jit(jax.grad(total, argnums=(0, 1, 2)))(query, key, value)
    padding = ~VALID
    chex.assert_tree_all_finite(gradients)
    for gradient in gradients:
        np.testing.assert_array_equal(np.asarray(gradient)[padding], 0)


def test_plain_attention_for_one_query_against_a_longer_cache():
    """Decoding: one query a row, more keys than queries, holes that are not written yet."""
    query = normal(0, BATCH, 1, HEADS, HEAD_DIM)
    key, value = (normal(seed, BATCH, 9, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    visible = np.random.default_rng(3).random((BATCH, 1, 9)) < 0.5
    out = np.asarray(jit(plain_attention)(query, key, value, visible))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "xla", "one query of a cache"])
def test_half_precision_errs_as_little_as_in_blocks(name):
    """Scores of a dozen or more, which half precision would round by several hundredths."""
    source, head_dim, heads = 32, 16, 3
    time = 1 if name == "one query of a cache" else source
    sizes = (4.0, time), (1.0, source), (1.0, source), (1.0, time)
    *given, pull = (
        (scale * normal(n, BATCH, size, heads, head_dim)).astype(jnp.bfloat16)
        for n, (scale, size) in enumerate(sizes)
    )
    visible = np.tri(source, dtype=bool)[None, -time:].repeat(BATCH, axis=0)
    expected = attention_in_float64(*given, visible, pull)

    def errors(read):
        @jit
        def all_of(*given):
            column = jnp.broadcast_to(jnp.arange(source)[None], (BATCH, source))
            keys = TokenIndices(column, column, jnp.ones_like(column))
            mask = Mask(TokenIndices(*(x[:, -time:] for x in keys)), keys, causal=True)
            out, back = jax.vjp(lambda *given: read(*given, mask), *given)
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

    own = partial(core.core_attention, implementation="plain" if time == 1 else name)
    # Both round weights and results once, but blocks round them before they are normalised, when
    # the largest is 1 and has no error. Of the gradients a fifth more or less is chance.
    assert np.all(errors(own) < [1.8, 1.2, 1.2, 1.2] * errors(partial(flash_attention, BLOCKED)))
