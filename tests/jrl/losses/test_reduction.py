"""Aggregation: the five modes, their denominators, and sums over any cut."""

import functools
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, batch, numpy_batch
from compiled import jitted
from jax.test_util import check_grads

import jrl

MODES = get_args(jrl.Aggregation)

every_mode = pytest.mark.parametrize("mode", MODES)


# Pieces of unequal sizes: equal ones make wrong denominators look right.
CUTS = {
    "rows": [slice(0, 1), slice(1, 4), slice(4, BATCH)],
    "other rows": [slice(0, 3), slice(3, BATCH)],
    "time": [(slice(None), slice(*edges)) for edges in ((0, 2), (2, 5), (5, 7))],
}


@functools.cache
def whole_and_cuts(mode):
    """Loss and gradient of several batches, and of their pieces given the counts of the batch."""
    counts = {"num_tokens": int(MASK.sum()), "num_sequences": int(MASK.any(1).sum())}
    lengths = np.broadcast_to(MASK.sum(1, keepdims=True), MASK.shape)

    def cut(per_token, pieces):
        return sum(
            jrl.aggregate(
                per_token[piece],
                MASK[piece],
                mode,
                max_length=11,
                sequence_lengths=lengths[piece],
                **counts,
            )
            for piece in pieces
        )

    @jax.jit
    @jax.vmap
    def found(per_token):
        full = functools.partial(jrl.aggregate, mask=MASK, mode=mode, max_length=11)
        of_cuts = {
            name: jax.value_and_grad(functools.partial(cut, pieces=pieces))(per_token)
            for name, pieces in CUTS.items()
        }
        return jax.value_and_grad(full)(per_token), of_cuts

    return jax.device_get(found(np.stack([batch(seed)["per_token"] for seed in range(10)])))


@pytest.mark.slow
@every_mode
@pytest.mark.parametrize("cut", CUTS)
def test_aggregate_of_pieces_adds_up(mode, cut):
    full, pieces = whole_and_cuts(mode)
    chex.assert_trees_all_close(pieces[cut], full, rtol=2e-6, atol=1e-6)


@every_mode
def test_aggregate_of_packed_rows(mode):
    b = batch(5)
    lengths = np.broadcast_to(b["mask"].sum(1, keepdims=True), MASK.shape)
    packed = jitted.aggregate(
        b["per_token"].reshape(1, -1),
        b["mask"].reshape(1, -1),
        mode=mode,
        max_length=11,
        num_sequences=int(MASK.any(1).sum()),
        sequence_lengths=lengths.reshape(1, -1),
    )
    expected = jitted.aggregate(b["per_token"], b["mask"], mode=mode, max_length=11)
    np.testing.assert_allclose(packed, expected, rtol=2e-6)


def test_aggregate_counts_may_be_traced():
    b = batch(6)
    expected = jitted.aggregate(b["per_token"], b["mask"], num_tokens=14)
    traced = jax.jit(lambda n: jrl.aggregate(b["per_token"], b["mask"], num_tokens=n))
    for count in (14.0, np.int64(14), np.int32(14), np.float32(14)):
        np.testing.assert_allclose(traced(count), expected, rtol=1e-6)


def test_aggregate_counts_beyond_32_bits():
    ones = np.ones((2, 3))
    np.testing.assert_allclose(jitted.aggregate(ones, ones, num_tokens=6 * 10**9), 1e-9, rtol=1e-6)


def test_aggregate_with_a_count_of_zero():
    nothing = np.zeros((2, 3), bool)
    for mode in MODES:
        counts = {"num_tokens": 0, "num_sequences": 0, "max_length": 3}
        assert jitted.aggregate(np.ones((2, 3)), nothing, mode=mode, **counts) == 0


def test_masked_mean_over_all_and_along_an_axis():
    x = numpy_batch(7)["per_token"]
    with jax.enable_x64(True):
        np.testing.assert_allclose(jitted.masked_mean(x, MASK), x[MASK].mean(), rtol=1e-12)
        per_row = [x[i][MASK[i]].mean() if MASK[i].any() else 0.0 for i in range(BATCH)]
        np.testing.assert_allclose(jitted.masked_mean(x, MASK, axis=1), per_row, rtol=1e-12)
        check_grads(jax.jit(lambda y: jrl.masked_mean(y**2, MASK)), (x,), 1)


def test_mean_records_add_up():
    x = batch(8)["per_token"] + np.arange(BATCH, dtype=np.float32)[:, None]
    pieces = [slice(0, 1), slice(1, 4), slice(4, BATCH)]
    means = [jrl.Mean.of(x[piece], MASK[piece]) for piece in pieces]
    together = sum(means)
    np.testing.assert_allclose(together.value(), np.asarray(x)[MASK].mean(), rtol=1e-6)
    assert together.count == int(MASK.sum()) and together.count.dtype == np.int32
    of_means = np.mean([mean.value() for mean in means])
    assert abs(of_means - together.value()) > 0.01


def test_mean_record_counts_beyond_float32():
    many = jrl.Mean(sum=jnp.float32(2**24), count=jnp.int32(2**24))
    more = many + jrl.Mean(sum=jnp.float32(1), count=jnp.int32(1))
    assert more.count == 2**24 + 1
    assert len(jax.tree.leaves(more)) == 2
    scanned, _ = jax.lax.scan(lambda total, _: (total + more, None), more, length=3)
    assert scanned.count == 4 * (2**24 + 1)
    assert jrl.Mean(sum=jnp.float32(0), count=jnp.int32(0)).value() == 0


def test_mean_record_has_no_gradient():
    slope = jax.jit(jax.grad(lambda x: jrl.Mean.of(x, jnp.ones(3)).value()))(np.ones(3))
    assert not np.any(slope)
