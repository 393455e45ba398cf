"""From logits to tokens: what is cut away, what is drawn, and its stated probability."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import full_but

from jrl.losses import EntropyStatistics
from jrl.losses import entropy_statistics as statistics_by_operations
from jrl.recipes import AdaptiveTemperature
from jrl.rollout.sampling import (
    GREEDY,
    Sampling,
    argmax_token,
    logprobs_of,
    policy_logits,
    row_temperatures,
    sampler_logits,
)
from jrl.rollout.sampling import sample_tokens as draw_by_operations

draw = jax.jit(draw_by_operations, static_argnums=1)
entropy_statistics = jax.jit(statistics_by_operations)

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
    out = sampler_logits(jnp.asarray([logits], jnp.float32), sampling)
    return set(np.flatnonzero(np.asarray(out)[0] > -np.inf).tolist())


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


@pytest.mark.slow
def test_one_program_is_greedy_or_not():
    logits = 3 * jax.random.normal(jax.random.key(2), (16, VOCAB))
    logits = logits.at[3].set(1.0)  # all are likeliest: the first is taken
    keys = jax.random.split(jax.random.key(0), len(logits))
    for greedy, sampling in ((False, Sampling()), (True, GREEDY)):
        either = draw(logits, Sampling(), keys, greedy=jnp.asarray(greedy))
        chex.assert_trees_all_equal(either, draw(logits, sampling, keys))


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
    batch = np.tile(np.array([logits], np.float32), (num_draws, 1))
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
    logits = np.tile(np.array([[0.3, 0.1, 0.2, 0.0]], np.float32), (9, 1))
    keys = jax.random.split(jax.random.key(3), 9)
    together, *_ = draw(logits, Sampling(), keys)
    order = np.random.default_rng(0).permutation(9)
    moved, *_ = draw(logits, Sampling(), keys[order])
    np.testing.assert_array_equal(moved, np.asarray(together)[order])
    assert len(set(together.tolist())) > 1


def test_logprobs_of_given_tokens():
    logits = [[1.0, -2.0, 0.5], [0.0, 0.0, 90.0]]
    run = jax.jit(logprobs_of)
    out = run(np.array(logits, np.float32), np.array([2, 0]))
    np.testing.assert_allclose(out, [math.log(softmax(logits[0])[2]), -90.0], rtol=1e-6)
    impossible = np.array([[0.0, -np.inf]], np.float32)
    assert run(impossible, np.array([1])) == -np.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 is negative: use 0 for greedy"),
        ({"top_k": 0}, r"top_k=0 keeps no token: use 1 or more, or None for all"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\], or be None"),
        ({"top_p": 1.5}, r"top_p=1.5 must lie in \(0, 1\]"),
        ({"top_p": 1e-50}, r"top_p=1e-50 leaves no token in float32: use temperature=0"),
        ({"temperature": 1e-37}, r"temperature=1e-37 is less than 1e-30, and logits"),
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


# The example of the reference: entropies of eight tokens, and the temperatures that follow.
ENTROPIES = [0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.2, 2.0]
BOUNDED = [0.95, 0.96119, 0.969654, 0.983071, 0.991535, 0.996487, 1, 1.05]
STANDARDIZED = [0.80641, 0.849734, 0.882508, 0.934453, 0.967226, 0.986398, 1, 1.024153]


def with_entropy(entropy, size=11):
    """Logits, one above the others, of a distribution with this entropy."""
    low, high = 0.0, 50.0
    for _ in range(80):
        height = (low + high) / 2
        p = np.array(softmax([height] + [0.0] * (size - 1)))
        low, high = (height, high) if -(p * np.log(p)).sum() > entropy else (low, height)
    return [low] + [0.0] * (size - 1)


def undecided_rows():
    rows = [with_entropy(entropy) for entropy in ENTROPIES]
    return np.array(rows, np.float32), statistics_of(ENTROPIES)


def statistics_of(entropies):
    return entropy_statistics(np.array(entropies, np.float32), np.ones(len(entropies), bool))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (AdaptiveTemperature(), BOUNDED),
        (AdaptiveTemperature(tau=0.1, temperature_signal="standardized"), STANDARDIZED),
    ],
)
@pytest.mark.parametrize("base", [1.0, 0.5])
def test_temperatures_follow_the_policy_s_entropy(rule, expected, base):
    """Which is its entropy at the base temperature."""
    logits, statistics = undecided_rows()
    sampling = Sampling(temperature=base, adaptive=rule)

    @jax.jit
    def program(logits, statistics):
        drawn = draw(logits, sampling, jax.random.split(jax.random.key(1), 8), statistics)
        temperatures = row_temperatures(logits, sampling, rule, statistics)
        return temperatures, drawn, sampler_logits(logits, sampling, statistics)

    given_logits = logits * np.float32(base)
    found, (_, drawn_from, policy), narrowed = jax.device_get(program(given_logits, statistics))
    # Six digits in the table; logits and entropies in float32.
    np.testing.assert_allclose(found, base * np.array(expected), atol=3e-6)
    np.testing.assert_allclose(narrowed, logits / np.array(expected)[:, None], atol=2e-4)
    assert np.abs(drawn_from - policy)[[0, 7]].max() > 1e-4


def test_beyond_the_extremes_a_temperature_is_bounded():
    rule, statistics = AdaptiveTemperature(tau=0.3), statistics_of([0.4, 0.5, 0.6])
    logits = np.array([with_entropy(0.001), with_entropy(2.3)], np.float32)
    sampling = Sampling(adaptive=rule)
    found = jax.jit(lambda *given: row_temperatures(given[0], sampling, rule, given[1]))(
        logits, statistics
    )
    np.testing.assert_allclose(found, [0.7, 1.3], rtol=1e-6)


@pytest.mark.parametrize("narrow", full_but([{}, {"top_k": 3}, {"top_p": 0.75}], {"top_k": 3}))
def test_frequencies_at_a_temperature_that_adapts(narrow):
    """Tokens come as often as the recorded probabilities say, at the row's temperature;
    beside them are the policy's at the base temperature."""
    base, tau, num_draws = 0.8, 0.6, 6000
    logits = [1.0, 0.0, -1.0, 0.5, -3.0]
    sampling = Sampling(temperature=base, **narrow, adaptive=AdaptiveTemperature(tau=tau))
    policy = softmax([z / base for z in logits])
    own = -sum(p * math.log(p) for p in policy)
    # The row lies a quarter of the way to the most undecided token: T = base (1 + tau / 4).
    statistics = EntropyStatistics(
        *(jnp.float32(x) for x in (math.log(own) - 0.25 * 2.0, 2.0, 1.0, -1.0))
    )
    keys = jax.random.split(jax.random.key(12), num_draws)
    batch = np.tile(np.array([logits], np.float32), (num_draws, 1))
    tokens, drawn_from, whole = map(np.asarray, draw(batch, sampling, keys, statistics))
    scaled = [z / (base * (1 + tau / 4)) for z in logits]
    among = kept_by_top_k(scaled, sampling.top_k or len(logits))
    if sampling.top_p is not None:
        among, _ = kept_by_top_p(scaled, sampling.top_p, among)
    hotter = softmax(scaled)
    total = sum(hotter[v] for v in among)
    counts = np.bincount(tokens, minlength=len(logits))
    assert set(np.flatnonzero(counts)) <= among
    expected = {v: num_draws * hotter[v] / total for v in among}
    chi_square = sum((counts[v] - expected[v]) ** 2 / expected[v] for v in among)
    assert chi_square < 23.5  # the 0.9999 quantile for at most four degrees of freedom
    for v in among:
        np.testing.assert_allclose(drawn_from[tokens == v], math.log(hotter[v] / total), atol=1e-5)
        np.testing.assert_allclose(whole[tokens == v], math.log(policy[v]), atol=1e-5)


@pytest.mark.slow
def test_the_first_step_draws_at_the_base_temperature_in_the_same_program():
    logits, statistics = undecided_rows()
    keys = jax.random.split(jax.random.key(4), len(ENTROPIES))
    sampling = Sampling(temperature=0.7, top_k=4, adaptive=AdaptiveTemperature(tau=0.9))
    once = jax.jit(chex.assert_max_traces(draw_by_operations, n=1), static_argnums=1)
    neutral = once(logits, sampling, keys, EntropyStatistics.neutral())
    adapted = once(logits, sampling, keys, statistics)
    without = draw(logits, sampling, keys)
    constant = draw(logits, Sampling(temperature=0.7, top_k=4), keys)
    chex.assert_trees_all_equal(constant, neutral, without)
    assert not np.array_equal(adapted[1], neutral[1])


@pytest.mark.slow
def test_greedy_ignores_a_temperature_that_adapts():
    logits, statistics = undecided_rows()
    keys = jax.random.split(jax.random.key(4), len(ENTROPIES))
    greedy = Sampling(temperature=0.0, adaptive=AdaptiveTemperature(tau=0.9))
    chex.assert_trees_all_equal(draw(logits, greedy, keys, statistics), draw(logits, GREEDY, keys))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": -0.1}, r"tau=-0.1 must be from 0, which is off, to below 1 with"),
        ({"tau": 1.0}, r"tau=1.0 must be from 0, which is off, to below 1 with"),
        (
            {"tau": 0.2, "temperature_signal": "standardized"},
            r"tau=0.2 must be from 0, which is off, to below 0.2 with temp.*='standardized'",
        ),
        ({"entropy_quantile": 1.5}, r"entropy_quantile=1.5 must be from 0 to 1"),
    ],
)
def test_adaptive_temperature_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveTemperature(**arguments)


def test_a_temperature_follows_one_of_two_signals():
    # A TypeError where annotations are checked.
    with pytest.raises((ValueError, TypeError), match="temperature_signal"):
        AdaptiveTemperature(temperature_signal="h")  # pyright: ignore[reportArgumentType]


def test_the_likeliest_token_is_the_first_of_the_largest():
    logits = np.random.default_rng(0).integers(-2, 3, (64, 9)).astype(np.float32)
    logits[0], logits[1, 3:] = -np.inf, np.inf
    np.testing.assert_array_equal(jax.jit(argmax_token)(logits), np.argmax(logits, axis=-1))
