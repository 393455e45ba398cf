"""The whole attention layer against numpy loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh
from references import causal_mask

from moe.attention.layer import attention
from moe.config import Model, ModelConfig
from moe.ops.attention import plain_attention
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
        def attend(query, key, value, scale, sinks):
            assert scale is sinks is None
            shape = (2, TIME, -1, HEAD_DIM)
            key, value = key.reshape(shape), value.reshape(shape)
            read = plain_attention(
                query.reshape(shape), key, value, causal_mask(jnp.asarray(valid))
            )
            return read.reshape(query.shape)

        return attention(weights, x, jnp.asarray(positions), attend, Model(config, mesh), 0)

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
