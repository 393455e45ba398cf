"""Weights, masks and diagnostics for a sampler that is not the trainer."""

import functools
import itertools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, batch
from compiled import jitted
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jrl

few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
NAMES = ("logprobs", "behaviour_logprobs", "mask")

LOG = np.array([[0.1, -0.2, 1.2, 0.0], [-0.5, -0.9, 0.3, np.nan]])
ZERO = np.zeros_like(LOG)


def test_mismatch_of_equal_policies():
    b = batch(1)
    arrays = (b["logprobs"], b["logprobs"], b["mask"])
    for level in ("token", "sequence", "geometric"):
        weights = jitted.mismatch_weights(*arrays, level=level)
        np.testing.assert_array_equal(weights, MASK.astype(np.float32))
    values = {name: float(x.value()) for name, x in jitted.mismatch_statistics(*arrays).items()}
    assert values.pop("weight") == values.pop("eff_sample_size") == 1
    assert set(values.values()) == {0.0}
    kept = jitted.divergence_rejection_mask(*arrays, bound=0.0)
    np.testing.assert_array_equal(kept, MASK)
    np.testing.assert_array_equal(jitted.geometric_rejection_mask(*arrays, low=1, high=1), MASK)


# One program for pieces of as many rows.
statistics, normalized = jax.jit(jrl.mismatch_statistics), jax.jit(jrl.normalized_weights)


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sets(st.integers(1, BATCH - 1)))
@few
def test_mismatch_statistics_of_pieces_add_up(seed, cuts):
    b = batch(seed)
    edges = [0, *sorted(cuts), BATCH]
    weights = jitted.truncated_weights(jitted.mismatch_weights(*(b[n] for n in NAMES)), b["mask"])
    mean = np.sum(weights) / int(MASK.sum())
    full = jax.device_get(statistics(*(b[n] for n in NAMES)))
    records, parts = [], []
    for i, j in itertools.pairwise(edges):
        piece = [np.asarray(b[n])[i:j] for n in NAMES]
        records.append(jax.device_get(statistics(*piece)))
        parts.append(normalized(np.asarray(weights)[i:j], piece[-1], mean=mean))
    summed = {
        name: functools.reduce(operator.add, (record[name] for record in records)).value()
        for name in full
    }
    expected = {name: each.value() for name, each in full.items()}
    chex.assert_trees_all_close(summed, expected, rtol=2e-5, atol=1e-6)
    joined = np.concatenate(parts)
    np.testing.assert_allclose(joined, jitted.normalized_weights(weights, b["mask"]), rtol=1e-5)
    np.testing.assert_allclose(float(joined.sum()) / MASK.sum(), 1, rtol=1e-5)


@pytest.mark.slow
def test_mismatch_statistics_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    with jax.enable_x64(True):
        b = batch(3, mask, jnp.float64)
        arrays = tuple(b[name] for name in NAMES)

        def local(*arrays):
            statistics = jax.lax.psum(jrl.mismatch_statistics(*arrays), "data")
            weights = jrl.mismatch_weights(*arrays, level="sequence")
            return statistics, weights, jrl.divergence_rejection_mask(*arrays, bound=0.2)

        cut = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P("data"),) * 3,
                out_specs=(P(), P("data"), P("data")),
            )
        )(*arrays)
        full = (
            jitted.mismatch_statistics(*arrays),
            jitted.mismatch_weights(*arrays, level="sequence"),
            jitted.divergence_rejection_mask(*arrays, bound=0.2),
        )
        chex.assert_trees_all_close(cut, full, rtol=1e-11)


def test_mismatch_has_no_gradient():
    b = batch(4)

    def total(logprobs, behaviour_logprobs, weights):
        arrays = (logprobs, behaviour_logprobs, b["mask"])
        outputs = (
            jrl.mismatch_weights(*arrays),
            jrl.sequence_masked_weights(*arrays, low=None, high=None),
            jrl.truncated_weights(weights, b["mask"]),
            jrl.icepop_weights(weights, b["mask"]),
            jrl.normalized_weights(weights, b["mask"]),
            jrl.normalized_weights(jnp.ones_like(weights), b["mask"], mean=jnp.mean(weights)),
            jrl.EffectiveSampleSize.of(weights, b["mask"]).value(),
            *jax.tree.leaves([x.value() for x in jrl.mismatch_statistics(*arrays).values()]),
        )
        return sum(jnp.sum(x) for x in outputs)

    arrays = (b["logprobs"], b["behaviour_logprobs"], b["importance_weights"])
    for slope in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays):
        assert not np.any(slope)


def test_mismatch_statistics_clamp_log_weights():
    logprobs, mask = np.array([[30.0, 0.0], [0.0, 0.0]]), np.array([[1, 1], [1, 0]])
    arrays = (logprobs, np.zeros((2, 2)), mask)
    actual = jitted.mismatch_statistics(*arrays, max_log_weight=2)
    expected = {
        "kl": -10.0,
        "log_ppl_diff": -7.5,
        "k3_kl": (np.exp(2) - 3) / 3,
        "chi2_token": (np.exp(4) - 1) / 3,
        "chi2_seq": (np.exp(4) - 1) / 2,
        "weight": (np.exp(2) + 2) / 3,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name].value(), value, rtol=1e-5, err_msg=name)
    free = jitted.mismatch_statistics(*arrays, max_log_weight=None)
    np.testing.assert_allclose(free["weight"].value(), (np.exp(30) + 2) / 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.5, None, [0.5, 1, 3]), (None, 2, [0.25, 1, 2]), (None, None, [0.25, 1, 3])],
)
def test_truncated_weights_with_open_ends(low, high, expected):
    weights = np.array([0.25, 1.0, 3.0])
    result = jitted.truncated_weights(weights, np.ones(3), low=low, high=high)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_mismatch_weights_clamp_probabilities_of_zero():
    logprobs = np.array([[-np.inf, -1.0]])
    sampler = np.array([[-1.0, -1.0]])
    ones = np.ones((1, 2))
    for arrays, sign in (((logprobs, sampler), -1), ((sampler, logprobs), 1)):
        for level in ("token", "sequence", "geometric"):
            weights = jitted.mismatch_weights(*arrays, ones, level=level)
            np.testing.assert_allclose(weights[0, 0], np.exp(20.0 * sign), rtol=1e-5)
        assert not jitted.divergence_rejection_mask(*arrays, ones, bound=0.1).any()
        assert not jitted.geometric_rejection_mask(*arrays, ones, low=0.5, high=2).any()


def test_mismatch_masks_keep_nan():
    logprobs = np.array([[np.nan, -1.0]])
    arrays = (logprobs, ZERO[:1, :2], np.ones((1, 2)))
    assert jitted.geometric_rejection_mask(*arrays, low=0.9, high=1.1).all()
    assert jitted.divergence_rejection_mask(*arrays, bound=0.1).all()
    weights = jitted.mismatch_weights(*arrays)
    assert np.isnan(jitted.icepop_weights(weights, arrays[2])[0, 0])
    assert np.isnan(jitted.truncated_weights(weights, arrays[2])[0, 0])
