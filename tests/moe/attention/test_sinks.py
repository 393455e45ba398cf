"""Attention sinks: a score of each head that no key has, in every form of core attention."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from tiers import full_but

from moe.attention import blocked as blocking
from moe.attention.core import core_attention
from moe.attention.fused import with_sinks
from moe.cache import StepCore, StepTokens
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.ops.attention import cached_attention
from moe.ops.mask import Mask, TokenIndices
from moe.tokens.packing import pack_rows

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, SCALE = 3, 12, 8, 4, 6, 5, 0.4
LENGTHS, WINDOW = np.array([12, 7, 10]), 5


def arrays():
    """Queries, keys, values, sinks, and what a sum weighs what is read by."""
    draw = np.random.default_rng(0)
    shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM)]
    given = [draw.normal(size=(BATCH, TIME, *shape)) for shape in shapes]
    weight = draw.normal(size=(BATCH, TIME, HEADS, V_HEAD_DIM)) * valid()[..., None, None]
    return [x.astype(np.float32) for x in (*given, draw.normal(size=HEADS), weight)]


def valid():
    return np.arange(TIME)[None] < LENGTHS[:, None]


def by_definition():
    """float64, key by key."""
    query, key, value, sinks, _ = (np.asarray(x, np.float64) for x in arrays())
    out = np.zeros((BATCH, TIME, HEADS, V_HEAD_DIM))
    for row, time, head in np.ndindex(BATCH, TIME, HEADS):
        if not valid()[row, time]:
            continue
        own, seen = head // (HEADS // KV_HEADS), slice(max(time - WINDOW + 1, 0), time + 1)
        powers = np.exp(SCALE * key[row, seen, own] @ query[row, time, head])
        out[row, time, head] = powers @ value[row, seen, own] / (powers.sum() + np.exp(sinks[head]))
    return out


def mask(window=WINDOW, causal=True, single=True):
    place = jnp.broadcast_to(jnp.arange(TIME), (BATCH, TIME))
    marks = TokenIndices(place, place, jnp.asarray(valid(), jnp.int32))
    return Mask(marks, marks, window, causal, single)


@cache
def outcome(name, *about):
    """What is read and its gradients, on one device; see `mask`."""

    def run(query, key, value, sinks, weight):
        def attend(*given):
            return core_attention(*given[:3], mask(*about), SCALE, name, sinks=given[3])

        out, back = jax.vjp(attend, query, key, value, sinks)
        return out, *back(weight)

    return jax.device_get(jit(run)(*arrays()))


def test_a_sink_takes_its_part_of_every_softmax():
    np.testing.assert_allclose(
        outcome("plain")[0] * valid()[..., None, None], by_definition(), atol=1e-6
    )


@pytest.mark.slow
def test_blocks_are_all_scores_at_once(monkeypatch):
    # Several blocks of queries and of keys.
    monkeypatch.setattr(blocking, "MAX_BLOCK_QUERIES", 4)
    monkeypatch.setattr(blocking, "MAX_BLOCK_KEYS", 8)
    seen = valid()[..., None, None]
    for found, expected in zip(outcome("blocked"), outcome("plain"), strict=True):
        if found.ndim == 4:
            found, expected = found * seen, expected * seen
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.abs(outcome("plain")[4]).min() > 1e-3


# By lengths and by a mask; a window of one token, one that ends with the row, one beyond it, none.
FUSED = [
    (WINDOW, True, True),
    (1, True, True),
    (TIME, True, True),
    (2 * TIME, True, True),
    (None, True, True),
    (WINDOW, True, False),
    (None, True, False),
    (WINDOW, False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "causal", "single"), full_but(FUSED, FUSED[0], FUSED[4], FUSED[5])
)
def test_to_a_fused_kernel_sinks_are_keys(window, causal, single):
    about = window, causal, single
    seen = valid()[..., None, None]
    for found, expected in zip(outcome("xla", *about), outcome("plain", *about), strict=True):
        if found.ndim == 4:
            found, expected = found * seen, expected * seen
        # float32 sums of a dozen terms; a sink's over all queries of a head.
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=5e-6)


def test_a_sink_is_rounded_to_more_digits_than_the_queries_have():
    """In half precision by two numbers: 1 + 2^-8 is none of bfloat16's."""
    given = [np.asarray(x, jnp.bfloat16) for x in arrays()[:3]]
    sinks = np.full(HEADS, SCALE * (1 + 2**-8), np.float32)
    query, *_ = jit(lambda *of: with_sinks(*of, scale=SCALE, num_sinks=1))(*given, sinks)
    scores = np.float32(query[:, 1:, :, -2:]).sum(axis=-1)
    np.testing.assert_allclose(scores, 1 + 2**-8, rtol=2**-16)


def test_sinks_of_step_equal_whole_sequence():
    query, key, value, sinks, _ = arrays()
    place = LENGTHS - 1
    rows = np.arange(BATCH)
    column = np.arange(TIME)[None]
    visible = (column <= place[:, None]) & (column > place[:, None] - WINDOW)
    given = query[rows, place], np.moveaxis(key, 1, 3), np.moveaxis(value, 1, 2), visible
    found = jit(lambda sinks, *given: cached_attention(*given, SCALE, sinks))(sinks, *given)
    np.testing.assert_allclose(found, by_definition()[rows, place], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("context", full_but(["gather blocked", "ring", "ulysses"], "ring"))
def test_sinks_on_sequence_devices_equal_one_device(context):
    way, _, attention = context.partition(" ")
    mesh = mesh_of("tp2 cp2")
    config = ModelConfig(
        2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        execution=Execution(context=way, attention=attention or None),
    )

    def packed():
        return pack_rows(jnp.zeros((BATCH, TIME), int), jnp.asarray(valid()), Model(config, mesh))

    def local(query, key, value, weight, sinks):
        attend = packed().core_attention_of_layer(0, WINDOW)
        out, back = jax.vjp(lambda *x: attend(*x[:3], SCALE, x[3]), query, key, value, sinks)
        return out, *back(weight)

    by_token, by_head = P(mesh.cp, mesh.tp), P(mesh.tp)
    specs = (*[by_token] * 4, by_head)
    run = jax.shard_map(local, mesh=mesh.mesh, in_specs=specs, out_specs=specs)

    def there_and_back(query, key, value, sinks, weight):
        zigzag = packed().zigzag
        flat = (zigzag.flatten(x) for x in (query, key, value, weight))
        *heads, of_sinks = run(*flat, sinks)
        return [zigzag.restore(x)[0] for x in heads], of_sinks

    found, of_sinks = jax.device_get(jit(there_and_back)(*arrays()))
    seen = valid()[..., None, None]
    for ours, expected in zip(found, outcome("plain"), strict=False):
        np.testing.assert_allclose(ours * seen, expected * seen, atol=3e-6)
    np.testing.assert_allclose(of_sinks, outcome("plain")[4], atol=3e-6)


def test_decode_kernel_rejects_sinks():
    config = ModelConfig(2, attention_sinks=True, execution=Execution(decode_attention="mosaic"))
    model = Model(config, mesh_of("dp1"))
    buffers = jnp.zeros((1, 2, 24, 8)), jnp.zeros((1, 2, 8, 24))
    with pytest.raises(
        ValueError, match="decode_attention='mosaic' is not supported: attention sinks"
    ):
        StepCore(model, 0, buffers, StepTokens(*jnp.zeros((2, 1), jnp.int32), jnp.ones(1, bool)))
