"""The router against loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import ModelConfig
from moe.routing import assignments, route, sequence_share, statistics

CONFIG = ModelConfig(vocab_size=5, num_experts=7, experts_per_token=3)
BATCH, TIME, EXPERTS = 2, 5, 7


def tokens(seed, scale=2.0):
    draw = np.random.default_rng(seed)
    logits = (scale * draw.normal(size=(BATCH * TIME, EXPERTS))).astype(np.float32)
    valid = draw.random(BATCH * TIME) < 0.7
    return logits, valid


def sums(logits, probabilities, counts, share, valid):
    return statistics(logits, probabilities, counts, share, jnp.asarray(valid, jnp.float32))


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@pytest.mark.parametrize("scale", [2.0, 40.0])
def test_route_takes_the_likeliest_and_renormalises(scale):
    logits, valid = tokens(0, scale)
    routing, probabilities = route(jnp.asarray(logits), jnp.asarray(valid), CONFIG)
    assert routing.weights.dtype == probabilities.dtype == jnp.float32
    for token, row in enumerate(logits):
        expected = softmax(row)
        # float32 exponentials: a few units in the seventh digit.
        np.testing.assert_allclose(probabilities[token], expected, rtol=2e-5, atol=1e-30)
        if not valid[token]:
            assert routing.experts[token].tolist() == [EXPERTS] * 3
            assert routing.weights[token].tolist() == [0.0] * 3
            continue
        best = sorted(range(EXPERTS), key=lambda expert: -expected[expert])[:3]
        assert routing.experts[token].tolist() == best
        total = sum(expected[best])
        np.testing.assert_allclose(
            routing.weights[token], expected[best] / total, rtol=2e-5, atol=1e-30
        )


def test_route_in_half_precision_is_computed_in_float32():
    logits, valid = tokens(1)
    half = jnp.asarray(logits, jnp.bfloat16)
    routing, probabilities = route(half, jnp.asarray(valid), CONFIG)
    expected, _ = route(half.astype(jnp.float32), jnp.asarray(valid), CONFIG)
    assert probabilities.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, routing, expected)


def test_padding_is_counted_nowhere():
    logits, valid = tokens(2)
    routing, _ = route(jnp.asarray(logits), jnp.asarray(valid), CONFIG)
    counts = np.asarray(assignments(routing.experts, EXPERTS))
    for token in range(len(logits)):
        expected = [float(expert in routing.experts[token].tolist()) for expert in range(EXPERTS)]
        assert counts[token].tolist() == expected
        assert counts[token].sum() == (3 if valid[token] else 0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_sequence_share_is_the_share_of_each_row(seed):
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 2, (BATCH, TIME, EXPERTS)).astype(np.float32)
    valid = draw.random((BATCH, TIME)) < draw.choice([0.0, 0.5, 1.0])
    share = np.asarray(sequence_share(jnp.asarray(counts), jnp.asarray(valid)))
    for row in range(BATCH):
        sent = np.zeros(EXPERTS)
        for time in range(TIME):
            if valid[row, time]:
                sent += counts[row, time]
        expected = sent / sent.sum() if sent.sum() else sent
        np.testing.assert_allclose(share[row], expected, rtol=1e-6)


def test_statistics_are_sums_over_valid_tokens():
    logits, valid = tokens(3)
    draw = np.random.default_rng(4)
    share = draw.random((BATCH * TIME, EXPERTS)).astype(np.float32)
    routing, probabilities = route(jnp.asarray(logits), jnp.asarray(valid), CONFIG)
    counts = assignments(routing.experts, EXPERTS)
    stats = sums(jnp.asarray(logits), probabilities, counts, jnp.asarray(share), valid)
    load, balance, z, entropy = np.zeros(EXPERTS), 0.0, 0.0, 0.0
    for token in np.flatnonzero(valid):
        p = softmax(logits[token])
        load[np.argsort(-p)[:3]] += 1
        balance += EXPERTS * float(np.sum(share[token] * p))
        z += float(np.log(np.sum(np.exp(logits[token].astype(np.float64))))) ** 2
        entropy -= float(np.sum(p * np.log(p)))
    assert float(stats.tokens) == valid.sum()
    np.testing.assert_array_equal(stats.load, load)
    # Sums of ten float32 terms.
    np.testing.assert_allclose(stats.balance, balance, rtol=1e-5)
    np.testing.assert_allclose(stats.z, z, rtol=1e-5)
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-5)


def whole(logits, valid):
    """Statistics of a batch with the shares that the network computes."""
    routing, probabilities = route(logits, valid, CONFIG)
    counts = assignments(routing.experts, EXPERTS)
    share = sequence_share(counts.reshape(BATCH, TIME, EXPERTS), valid.reshape(BATCH, TIME))
    share = jnp.repeat(share, TIME, axis=0)
    return sums(logits, probabilities, counts, share, valid), share


def test_balance_is_one_when_even_and_grows_to_experts_over_k():
    valid = jnp.arange(BATCH * TIME) % 5 != 2
    # Even probabilities give a loss of 1 a token wherever the tokens are sent.
    even, _ = whole(jnp.zeros((BATCH * TIME, EXPERTS)), valid)
    np.testing.assert_allclose(even.balance / even.tokens, 1.0, rtol=1e-6)
    np.testing.assert_allclose(even.entropy / even.tokens, np.log(EXPERTS), rtol=1e-6)
    np.testing.assert_allclose(even.z / even.tokens, np.log(EXPERTS) ** 2, rtol=1e-6)
    # All tokens on the same three experts: shares 1/3 where all probability is.
    one_sided = jnp.where(jnp.arange(EXPERTS) < 3, 30.0, -30.0)
    packed, _ = whole(jnp.tile(one_sided, (BATCH * TIME, 1)), valid)
    np.testing.assert_allclose(packed.balance / packed.tokens, EXPERTS / 3, rtol=1e-6)
    np.testing.assert_array_equal(packed.load, [8, 8, 8, 0, 0, 0, 0])
    np.testing.assert_allclose(packed.entropy / packed.tokens, np.log(3), rtol=1e-6)


def test_gradient_flows_through_probabilities_and_not_through_shares():
    logits, valid = (jnp.asarray(x) for x in tokens(5))
    _, share = whole(logits, valid)

    def balance(logits, share):
        probabilities = jax.nn.softmax(logits, axis=-1)
        counts = jnp.zeros_like(probabilities)
        return sums(logits, probabilities, counts, share, valid).balance

    by_logits, by_share = jax.grad(balance, argnums=(0, 1))(logits, share)
    np.testing.assert_array_equal(by_share, 0.0)
    for token in range(BATCH * TIME):
        p = softmax(logits[token])
        pull = np.asarray(share[token], np.float64)
        expected = EXPERTS * p * (pull - p @ pull) if valid[token] else np.zeros(EXPERTS)
        np.testing.assert_allclose(by_logits[token], expected, atol=2e-6)
    # Through the whole of it the gradient is the same: counting has none.
    through = jax.grad(lambda logits: whole(logits, valid)[0].balance)(logits)
    np.testing.assert_allclose(through, by_logits, atol=2e-6)


def test_weights_carry_gradient_to_the_chosen_logits_only():
    logits, valid = (jnp.asarray(x) for x in tokens(6))
    pull = jnp.arange(3.0)

    def output(logits):
        return jnp.sum(route(logits, valid, CONFIG)[0].weights * pull[None, :])

    gradient = np.asarray(jax.grad(output)(logits))
    chosen = np.asarray(assignments(route(logits, valid, CONFIG)[0].experts, EXPERTS)) > 0
    np.testing.assert_allclose(gradient[~chosen], 0.0, atol=1e-6)
    assert np.all(np.abs(gradient[chosen]) > 0)
