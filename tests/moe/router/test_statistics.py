"""The router's sums: balance, z-loss, entropy, what is counted and what is not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from programs import jit

from moe.config import ModelConfig
from moe.ops.precision import float32_product
from moe.router.routing import assignments, topk_routing
from moe.router.statistics import LoadFractions, statistics
from moe.tokens.sequences import load_fraction

CONFIG = ModelConfig(vocab_size=5, num_experts=7, experts_per_token=3)
BATCH, TIME, EXPERTS = 2, 5, 7


def tokens(seed, scale=2.0):
    draw = np.random.default_rng(seed)
    logits = (scale * draw.normal(size=(BATCH * TIME, EXPERTS))).astype(np.float32)
    valid = draw.random(BATCH * TIME) < 0.7
    return logits, valid


def sums(logits, probabilities, counts, share, valid, config=CONFIG):
    weight = jnp.asarray(valid, jnp.float32)
    load = float32_product(weight, counts)
    return statistics(logits, probabilities, load, LoadFractions(share), weight, config)


def routed(logits, valid, config):
    """Experts and probabilities of each token, and what it sends to each expert."""
    routing, probabilities = topk_routing(logits, valid, config)
    return routing.experts, probabilities, assignments(routing.experts, config.num_experts)


@partial(jit, static_argnums=3)
def summed(logits, share, valid, config):
    """The probabilities, and the statistics under such load fractions."""
    _, probabilities, counts = routed(logits, valid, config)
    return probabilities, sums(logits, probabilities, counts, share, valid, config)


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def test_padding_is_counted_nowhere():
    logits, valid = tokens(2)
    experts, _, counts = jax.device_get(jit(partial(routed, config=CONFIG))(logits, valid))
    for token in range(len(logits)):
        expected = [float(expert in experts[token]) for expert in range(EXPERTS)]
        assert counts[token].tolist() == expected
        assert counts[token].sum() == (3 if valid[token] else 0)


def test_statistics_are_sums_over_valid_tokens():
    logits, valid = tokens(3)
    draw = np.random.default_rng(4)
    share = draw.random((BATCH * TIME, EXPERTS)).astype(np.float32)
    _, stats = summed(logits, share, valid, CONFIG)
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
    """Statistics of a batch with the load fractions that the network computes."""
    _, probabilities, counts = routed(logits, valid, CONFIG)
    share = load_fraction(jnp.sum(counts.reshape(BATCH, TIME, EXPERTS), axis=1))
    share = jnp.repeat(share, TIME, axis=0)
    return sums(logits, probabilities, counts, share, valid), share


def test_balance_is_one_when_even_and_grows_to_experts_over_k():
    valid, program = np.arange(BATCH * TIME) % 5 != 2, jit(whole)
    # Even probabilities give a loss of 1 a token wherever the tokens are sent.
    even, _ = jax.device_get(program(np.zeros((BATCH * TIME, EXPERTS), np.float32), valid))
    np.testing.assert_allclose(even.balance / even.tokens, 1.0, rtol=1e-6)
    np.testing.assert_allclose(even.entropy / even.tokens, np.log(EXPERTS), rtol=1e-6)
    np.testing.assert_allclose(even.z / even.tokens, np.log(EXPERTS) ** 2, rtol=1e-6)
    # All tokens on the same three experts: fractions 1/3 on all probability.
    one_sided = np.where(np.arange(EXPERTS) < 3, 30.0, -30.0).astype(np.float32)
    packed, _ = jax.device_get(program(np.tile(one_sided, (BATCH * TIME, 1)), valid))
    np.testing.assert_allclose(packed.balance / packed.tokens, EXPERTS / 3, rtol=1e-6)
    np.testing.assert_array_equal(packed.load, [8, 8, 8, 0, 0, 0, 0])
    np.testing.assert_allclose(packed.entropy / packed.tokens, np.log(3), rtol=1e-6)


def test_gradient_flows_through_probabilities_and_not_through_shares():
    logits, valid = tokens(5)
    share = np.asarray(jit(whole)(logits, valid)[1])

    def balance(logits, share, valid):
        probabilities = jax.nn.softmax(logits, axis=-1)
        counts = jnp.zeros_like(probabilities)
        return sums(logits, probabilities, counts, share, valid).balance

    by_logits, by_share = jax.device_get(
        jit(jax.grad(balance, argnums=(0, 1)))(logits, share, valid)
    )
    np.testing.assert_array_equal(by_share, 0.0)
    for token in range(BATCH * TIME):
        p = softmax(logits[token])
        pull = np.asarray(share[token], np.float64)
        expected = EXPERTS * p * (pull - p @ pull) if valid[token] else np.zeros(EXPERTS)
        np.testing.assert_allclose(by_logits[token], expected, atol=2e-6)
    # Through the whole of it the gradient is the same: counting has none.
    through = jit(jax.grad(lambda *given: whole(*given)[0].balance))(logits, valid)
    np.testing.assert_allclose(through, by_logits, atol=2e-6)


EIGHT = replace(CONFIG, num_experts=8, experts_per_token=4)


def test_sigmoid_statistics_are_those_of_scores_that_sum_to_one():
    config = replace(EIGHT, router_scores="sigmoid")
    logits = np.random.default_rng(11).normal(size=(5, 8)).astype(np.float32)
    share = np.full((5, 8), 0.125, np.float32)
    probabilities, stats = summed(logits, share, np.ones(5, bool), config)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    p = scores / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, p, rtol=1e-5)
    np.testing.assert_allclose(stats.entropy, -np.sum(p * np.log(p)), rtol=1e-5)
    np.testing.assert_allclose(stats.balance, 5.0, rtol=1e-6)
    # The z-loss is of the logits themselves.
    totals = np.exp(logits.astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(stats.z, np.sum(np.log(totals) ** 2), rtol=1e-5)


def test_losses_of_a_batch_and_of_everything_use_their_own_shares():
    (logits, valid), draw = tokens(12), np.random.default_rng(13)
    batch, everywhere = (draw.random(EXPERTS).astype(np.float32) for _ in range(2))

    @jit
    def of_all(logits, valid, batch, everywhere):
        _, probabilities, counts = routed(logits, valid, CONFIG)
        given = LoadFractions(jnp.zeros_like(probabilities), batch, everywhere)
        weight = valid.astype(jnp.float32)
        load = float32_product(weight, counts)
        return probabilities, statistics(logits, probabilities, load, given, weight, CONFIG)

    probabilities, stats = jax.device_get(of_all(logits, valid, batch, everywhere))
    mass = probabilities[valid].sum(axis=0)
    np.testing.assert_allclose(stats.batch_balance, EXPERTS * mass @ batch, rtol=1e-5)
    np.testing.assert_allclose(stats.global_balance, EXPERTS * mass @ everywhere, rtol=1e-5)
    assert float(stats.padded) == BATCH * TIME - int(valid.sum())
    assert float(stats.balance) == float(stats.dropped) == 0
