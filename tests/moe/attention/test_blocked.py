"""Reading block by block is reading all at once: values, gradients, and no array of all scores."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import array_sizes, jit, mesh_of
from tiers import full_but

from moe.attention import blocked, core
from moe.attention import blocked as blocking
from moe.attention.blocked import BLOCKED, BLOCKED_ON_GPU, GPU_SIZES, blocking_of
from moe.kernels.choice import Devices
from moe.ops.attention import flash_attention, plain_attention
from moe.ops.mask import Mask, TokenIndices, visible

BATCH, KV_HEADS, GROUP, HEAD_DIM, V_HEAD_DIM = 4, 3, 5, 6, 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks to a span and several spans to a row, two rows at a time."""
    monkeypatch.setattr(blocking, "MAX_BLOCK_QUERIES", 5)
    monkeypatch.setattr(blocking, "MAX_SPANS", 2)
    monkeypatch.setattr(blocked, "MAX_BLOCK_SCORES", 2 * KV_HEADS * GROUP * 5 * 19)


def arrays(time, source, dtype=np.float32):
    shapes = [
        (BATCH, time, KV_HEADS * GROUP, HEAD_DIM),
        (BATCH, source, KV_HEADS, HEAD_DIM),
        (BATCH, source, KV_HEADS, V_HEAD_DIM),
        (BATCH, time, KV_HEADS * GROUP, V_HEAD_DIM),
    ]
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(dtype) for shape in shapes]


def mask_of(time, source, causal, window=None):
    """Segments of uneven lengths, some padding between them; the first row's first query sees
    nothing."""
    draw = np.random.default_rng(1)
    segments = np.sort(draw.integers(1, 4, (BATCH, source)), axis=1)
    segments[draw.random(segments.shape) < 0.1] = 0
    segments[0, source - time if causal else 0] = 0
    column = np.broadcast_to(np.arange(source), segments.shape)
    same = (segments[:, :, None] == segments[:, None, :]) & np.tri(source, k=-1, dtype=bool)
    keys = [x.astype(np.int32) for x in (column, same.sum(axis=2), segments)]
    own = slice(source - time, None)
    if not causal:
        own = np.arange(time) % source
    marks = (TokenIndices(*map(jnp.asarray, x)) for x in ([x[:, own] for x in keys], keys))
    return Mask(*marks, window, causal)


def at_once(mask, scale=None):
    """The twin."""

    def read(query, key, value):
        seen = visible(mask.query, mask.key, mask.window)
        return plain_attention(query, key, value, seen, scale)

    return read


@jit
def _seen_of(mask):
    return visible(mask.query, mask.key, mask.window).any(axis=-1)


def seen_of(mask):
    """The queries that see anything."""
    return np.asarray(_seen_of(mask))


def outcome(function, given, weight):
    """The result and the gradients of queries, keys and values."""

    def total(*given):
        out = function(*given)
        return jnp.sum(jnp.where(weight != 0, out.astype(jnp.float32) * weight, 0.0)), out

    program = jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), gradients = jax.device_get(program(*given))
    return out, gradients


def test_blocks_are_larger_on_gpus_and_the_values_are_the_same():
    """A GPU launches several kernels for each block."""
    assert blocking_of(4096, 4096, True, GPU_SIZES).num_blocks == 8
    assert blocking_of(19, 19, True).num_blocks == 4
    *given, weight = arrays(19, 19)
    mask = mask_of(19, 19, True)
    # The result of a query that sees no key is not defined.
    sees = np.asarray(visible(mask.query, mask.key, mask.window)).any(-1)[..., None, None]
    weight = np.where(sees, weight, 0)
    in_one, in_blocks = (
        outcome(lambda *x, flash=flash: flash_attention(flash, *x, mask, 0.7), given, weight)
        for flash in (BLOCKED_ON_GPU, BLOCKED)
    )
    np.testing.assert_allclose(
        *(np.where(sees, out, 0) for out, _ in (in_one, in_blocks)), atol=2e-6
    )
    chex.assert_trees_all_close(in_one[1], in_blocks[1], rtol=1e-7, atol=5e-6)
    found = [core._blocked(Devices(platform, 0.0)) for platform in ("gpu", "cpu", "tpu")]
    assert found == [BLOCKED_ON_GPU, BLOCKED, BLOCKED]


READINGS = [
    (19, 19, True, None, 2048),
    (3, 3, True, None, 2048),
    (8, 19, True, None, 2048),
    (18, 8, False, None, 2048),
    (19, 19, True, 4, 2048),
    # Several blocks of keys.
    (19, 19, True, None, 4),
    (19, 19, True, 4, 4),
    (8, 19, True, 5, 6),
    (18, 8, False, 3, 3),
]


@pytest.mark.parametrize(
    ("time", "source", "causal", "window", "keys"),
    # Blocks of a cache with a window.
    full_but(READINGS, READINGS[7]),
)
def test_values_and_gradients_are_those_of_all_scores_at_once(
    time, source, causal, window, keys, monkeypatch
):
    monkeypatch.setattr(blocking, "MAX_BLOCK_KEYS", keys)
    *given, weight = arrays(time, source)
    mask = mask_of(time, source, causal, window)
    seen = seen_of(mask)
    assert not seen.all()
    assert seen.sum() > 0.7 * seen.size
    weight = weight * seen[..., None, None]
    (out, gradients), (expected, expected_gradients) = (
        outcome(function, given, weight)
        for function in (lambda *x: flash_attention(BLOCKED, *x, mask, 0.7), at_once(mask, 0.7))
    )
    assert out.shape == (BATCH, time, KV_HEADS * GROUP, V_HEAD_DIM)
    chex.assert_tree_all_finite(out)
    # float32 sums of at most 19 terms of order one.
    np.testing.assert_allclose(out[seen], expected[seen], atol=2e-6)
    for own, other in zip(gradients, expected_gradients, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.slow
def test_a_window_known_at_run_time_is_the_same():
    *given, _ = arrays(19, 19)
    mask = mask_of(19, 19, True, 4)
    whole = jit(lambda window, *x: flash_attention(BLOCKED, *x, mask.replace(window=window)))
    np.testing.assert_array_equal(
        whole(np.int32(4), *given), jit(lambda *x: flash_attention(BLOCKED, *x, mask))(*given)
    )


@pytest.mark.slow
def test_hidden_blocks_are_not_computed(monkeypatch):
    """What is hidden whole may hold anything, NaN too: nothing looks at it."""
    monkeypatch.setattr(blocking, "MAX_BLOCK_KEYS", 4)
    monkeypatch.setattr(blocked, "MAX_BLOCK_SCORES", 1)
    time = 40
    query, key, value, _ = arrays(time, time)
    column = np.broadcast_to(np.arange(time, dtype=np.int32), (BATCH, time))
    marks = TokenIndices(*map(jnp.asarray, (column, column, np.ones_like(column))))

    def read(window, poisoned):
        """What the last block of queries gets."""
        hidden = (column < poisoned)[..., None, None]
        spoilt = [np.where(hidden, np.float32(np.nan), x) for x in (key, value)]
        mask = Mask(marks, marks, window, causal=True)
        return jit(lambda *x: flash_attention(BLOCKED, *x, mask)[:, -5:])(query, *spoilt)

    # Queries 35 to 39 look back to 28, the first of a block of keys.
    chex.assert_tree_all_finite(read(8, 28))
    assert np.all(np.isnan(read(9, 28)))


@pytest.mark.slow
def test_half_precision_sums_in_float32():
    given = arrays(19, 19, jnp.bfloat16)[:3]
    weight, mask = arrays(19, 19)[3], mask_of(19, 19, True)
    seen = seen_of(mask)
    weight = weight * seen[..., None, None]
    out, gradients = outcome(lambda *x: flash_attention(BLOCKED, *x, mask), given, weight)
    wide = [x.astype(np.float32) for x in given]
    expected, expected_gradients = outcome(at_once(mask), wide, weight)
    assert out.dtype == jnp.bfloat16
    # A few roundings to 8 bits of numbers of order one; gradients sum 19 x 5 of them.
    np.testing.assert_allclose(out.astype(np.float32)[seen], expected[seen], atol=2e-2)
    for own, other in zip(gradients, expected_gradients, strict=True):
        assert own.dtype == jnp.bfloat16
        np.testing.assert_allclose(own.astype(np.float32), other, atol=0.1)


@pytest.mark.slow
def test_extreme_scores_stay_finite():
    query, key, value, weight = arrays(19, 19)
    mask = mask_of(19, 19, True)
    out, gradients = outcome(
        lambda *x: flash_attention(BLOCKED, *x, mask), (query * 10_000, key * 10_000, value), weight
    )
    chex.assert_tree_all_finite((out, gradients))
    # The query that sees nothing.
    assert not np.any(gradients[0][0, 0])


def query_size(time):
    return BATCH * time * KV_HEADS * GROUP * V_HEAD_DIM


def test_no_array_holds_all_scores():
    time = 96
    *given, weight = arrays(time, time)
    mask = mask_of(time, time, True)
    scores = BATCH * KV_HEADS * GROUP * time * time

    def largest(function):
        def total(*given):
            return jnp.sum(function(*given) * weight)

        program = jax.make_jaxpr(jax.value_and_grad(total, (0, 1, 2)))(*given)
        return max(array_sizes(program.jaxpr))

    assert largest(at_once(mask)) == scores
    # Queries are the largest that is left, padded to whole blocks.
    assert largest(lambda *x: flash_attention(BLOCKED, *x, mask)) == query_size(100)


@pytest.mark.slow
def test_inside_a_shard_map():
    """Rows over two devices, with the types of varying axes checked."""
    query, key, value, weight = (x[:2] for x in arrays(19, 19))
    mask = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[:2]), mask_of(19, 19, True))
    weight = weight * seen_of(mask)[..., None, None]
    mesh = mesh_of("dp2")

    def own(query, key, value, mask):
        return core.core_attention(query, key, value, mask, implementation="blocked")

    spec = P(mesh.dp)
    over_two = jax.shard_map(own, mesh=mesh.mesh, in_specs=spec, out_specs=spec)
    given = query, key, value
    mine = outcome(lambda *x: over_two(*x, mask), given, weight)
    plain = outcome(at_once(mask), given, weight)
    chex.assert_tree_all_finite(mine[0])
    chex.assert_trees_all_close(mine[1], plain[1], rtol=1e-7, atol=1e-5)


def test_many_scores_on_a_cpu_are_computed_in_blocks(monkeypatch):
    *given, _ = arrays(19, 19)
    mask = mask_of(19, 19, True)

    def scans():
        return str(jax.make_jaxpr(lambda *x: core.core_attention(*x, mask))(*given)).count("scan")

    assert scans() == 0
    monkeypatch.setattr(core, "MAX_PLAIN_SCORES_CPU", BATCH * KV_HEADS * GROUP * 19 * 19 - 1)
    assert scans() > 0
