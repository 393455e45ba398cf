"""From logits to tokens: what is cut away, what is drawn, and its stated probability."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jrl.rollout.sampling import (
    GREEDY,
    Sampling,
    draw,
    logprobs_of,
    policy_logits,
    sampler_logits,
)

VOCAB = 7
exactly = settings(max_examples=60, deadline=None, derandomize=True)
# Quarters, so that ties are common.
rows = st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB).map(
    lambda quarters: [quarter / 4 for quarter in quarters]
)


def softmax(logits):
    powers = [math.exp(z - max(logits)) for z in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def kept_by_top_k(logits, k):
    """Tokens with fewer than k tokens strictly above them."""
    return {v for v, z in enumerate(logits) if sum(other > z for other in logits) < k}


def kept_by_top_p(logits, p, among):
    """The smallest set of likeliest tokens that reaches p, and whatever ties with its last one."""
    probabilities = dict(
        zip(sorted(among), softmax([logits[v] for v in sorted(among)]), strict=True)
    )
    kept, total, nearest = set(), 0.0, 1.0
    for v in sorted(among, key=lambda v: -logits[v]):
        if total >= p:
            break
        kept.add(v)
        total += probabilities[v]
        nearest = min(nearest, abs(total - p))
    lowest = min(logits[v] for v in kept)
    return {v for v in among if logits[v] >= lowest}, nearest


def kept(logits, sampling):
    out = sampler_logits(jnp.asarray([logits], jnp.float32), sampling)[0]
    return {v for v in range(VOCAB) if out[v] > -jnp.inf}


@exactly
@given(rows, st.integers(1, VOCAB + 2))
def test_top_k_keeps_the_likeliest_and_their_ties(logits, k):
    assert kept(logits, Sampling(top_k=k)) == kept_by_top_k(logits, k)


@exactly
@given(rows, st.floats(0.05, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    expected, nearest = kept_by_top_p(logits, p, range(VOCAB))
    assume(nearest > 1e-5)  # float32 sums may fall on either side
    assert kept(logits, Sampling(top_p=p)) == expected


@exactly
@given(rows, st.integers(1, VOCAB), st.floats(0.05, 0.99))
def test_top_p_applies_to_what_top_k_leaves(logits, k, p):
    expected, nearest = kept_by_top_p(logits, p, kept_by_top_k(logits, k))
    assume(nearest > 1e-5)
    assert kept(logits, Sampling(top_k=k, top_p=p)) == expected


def test_limits_that_cut_nothing():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)), jnp.float32)
    for sampling in (
        Sampling(top_k=VOCAB),
        Sampling(top_k=10 * VOCAB),
        Sampling(top_p=1.0),
        Sampling(top_k=VOCAB, top_p=1.0),
    ):
        np.testing.assert_array_equal(sampler_logits(logits, sampling), logits)


def test_a_tiny_top_p_keeps_the_likeliest_token():
    logits = [0.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0]
    assert kept(logits, Sampling(top_p=1e-6)) == {1}
    assert kept([5.0] * VOCAB, Sampling(top_p=0.1)) == set(range(VOCAB))


def test_temperature_divides_before_the_cut():
    logits = [2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]
    cold, hot = (kept(logits, Sampling(temperature=t, top_p=0.8)) for t in (0.25, 4.0))
    assert cold == {0}
    assert hot == {0, 1, 2, 3, 4}
    given_logits = jnp.asarray([logits])
    np.testing.assert_allclose(
        policy_logits(given_logits, Sampling(temperature=4.0)), given_logits / 4
    )
    np.testing.assert_array_equal(policy_logits(given_logits, GREEDY), given_logits)


def test_greedy_takes_the_first_likeliest():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 0.0, 4.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    tokens, logprobs, policy = draw(logits, GREEDY, keys)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_array_equal(logprobs, [0.0, 0.0])
    expected = [math.log(softmax(row)[v]) for row, v in zip(logits.tolist(), (1, 0), strict=True)]
    np.testing.assert_allclose(policy, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=3),
        Sampling(top_p=0.75),
    ],
)
def test_frequencies_are_the_stated_probabilities(sampling):
    logits = [1.0, 0.0, -1.0, 0.5, -3.0]
    num_draws = 6000
    keys = jax.random.split(jax.random.key(11), num_draws)
    batch = jnp.tile(jnp.asarray([logits]), (num_draws, 1))
    tokens, logprobs, policy = map(np.asarray, draw(batch, sampling, keys))

    scaled = [z / sampling.temperature for z in logits]
    among = kept_by_top_k(scaled, sampling.top_k or len(logits))
    if sampling.top_p is not None:
        among, _ = kept_by_top_p(scaled, sampling.top_p, among)
    whole = softmax(scaled)
    total = sum(whole[v] for v in among)
    counts = np.bincount(tokens, minlength=len(logits))
    assert set(np.flatnonzero(counts)) <= among
    expected = {v: num_draws * whole[v] / total for v in among}
    chi_square = sum((counts[v] - expected[v]) ** 2 / expected[v] for v in among)
    # The 0.9999 quantile for at most four degrees of freedom; the seed is fixed.
    assert chi_square < 23.5
    for v in among:
        np.testing.assert_allclose(logprobs[tokens == v], math.log(whole[v] / total), atol=1e-5)
        np.testing.assert_allclose(policy[tokens == v], math.log(whole[v]), atol=1e-5)


def test_each_row_has_its_own_key():
    logits = jnp.tile(jnp.asarray([[0.3, 0.1, 0.2, 0.0]]), (9, 1))
    keys = jax.random.split(jax.random.key(3), 9)
    together, *_ = draw(logits, Sampling(), keys)
    order = np.random.default_rng(0).permutation(9)
    moved, *_ = draw(logits, Sampling(), keys[order])
    np.testing.assert_array_equal(moved, together[order])
    assert len(set(together.tolist())) > 1


def test_logprobs_of_given_tokens():
    logits = [[1.0, -2.0, 0.5], [0.0, 0.0, 90.0]]
    out = logprobs_of(jnp.asarray(logits), jnp.asarray([2, 0]))
    np.testing.assert_allclose(out, [math.log(softmax(logits[0])[2]), -90.0], rtol=1e-6)
    assert logprobs_of(jnp.asarray([[0.0, -jnp.inf]]), jnp.asarray([1]))[0] == -jnp.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 is negative: use 0 for greedy"),
        ({"top_k": 0}, r"top_k=0 keeps no token: use 1 or more, or None for all"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\], or be None"),
        ({"top_p": 1.5}, r"top_p=1.5 must lie in \(0, 1\]"),
    ],
)
def test_sampling_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_which_samplings_leave_tokens_without_probability():
    assert not Sampling().truncates
    assert not Sampling(temperature=3.0).truncates
    assert Sampling(top_k=2).truncates
    assert Sampling(top_p=0.5).truncates
    assert GREEDY.greedy
    assert GREEDY.truncates
