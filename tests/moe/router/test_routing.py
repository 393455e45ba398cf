"""The router against loops over tokens."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit
from tiers import full_but

from moe.config import ModelConfig
from moe.router.routing import assignments, counted_routing, topk_routing

CONFIG = ModelConfig(vocab_size=5, num_experts=7, experts_per_token=3)
BATCH, TIME, EXPERTS = 2, 5, 7
route = jit(topk_routing, static_argnums=2)


def tokens(seed, scale=2.0):
    draw = np.random.default_rng(seed)
    logits = (scale * draw.normal(size=(BATCH * TIME, EXPERTS))).astype(np.float32)
    valid = draw.random(BATCH * TIME) < 0.7
    return logits, valid


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@pytest.mark.parametrize("scale", [2.0, 40.0])
def test_route_takes_the_likeliest_and_renormalises(scale):
    logits, valid = tokens(0, scale)
    routing, probabilities = jax.device_get(route(logits, valid, CONFIG))
    assert routing.probs.dtype == probabilities.dtype == np.float32
    for token, row in enumerate(logits):
        expected = softmax(row)
        # float32 exponentials: a few units in the seventh digit.
        np.testing.assert_allclose(probabilities[token], expected, rtol=2e-5, atol=1e-30)
        if not valid[token]:
            assert routing.experts[token].tolist() == [EXPERTS] * 3
            assert routing.probs[token].tolist() == [0.0] * 3
            continue
        best = sorted(range(EXPERTS), key=lambda expert: -expected[expert])[:3]
        assert routing.experts[token].tolist() == best
        total = sum(expected[best])
        np.testing.assert_allclose(
            routing.probs[token], expected[best] / total, rtol=2e-5, atol=1e-30
        )


def test_route_in_half_precision_is_computed_in_float32():
    logits, valid = tokens(1)
    half = logits.astype(jnp.bfloat16)
    routing, probabilities = route(half, valid, CONFIG)
    expected, _ = route(half.astype(np.float32), valid, CONFIG)
    assert probabilities.dtype == jnp.float32
    chex.assert_trees_all_equal(routing, expected)


def test_weights_carry_gradient_to_the_chosen_logits_only():
    logits, valid = tokens(6)

    def output(logits, valid):
        routing, _ = topk_routing(logits, valid, CONFIG)
        chosen = assignments(routing.experts, EXPERTS)
        return jnp.sum(routing.probs * jnp.arange(3.0)[None, :]), chosen

    gradient, chosen = map(np.asarray, jit(jax.grad(output, has_aux=True))(logits, valid))
    chosen = chosen > 0
    np.testing.assert_allclose(gradient[~chosen], 0.0, atol=1e-6)
    assert np.all(np.abs(gradient[chosen]) > 0)


def routed_by_hand(row, bias, config):
    """The experts of one token and their weights, in float64, as DeepSeek-V3's text goes."""
    row = row.astype(np.float64)
    scores = softmax(row) if config.router_scores == "softmax" else 1 / (1 + np.exp(-row))
    wanted = {e: (row if config.softmax_after_topk else scores)[e] + bias[e] for e in range(8)}
    width, kept = 8 // config.num_expert_groups, config.expert_groups_per_token
    groups = [range(first, first + width) for first in range(0, 8, width)]
    if len(groups) > 1:
        best = config.experts_per_token // kept
        groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:best]))
        groups = groups[:kept]
    within = [expert for group in groups for expert in group]
    chosen = sorted(within, key=lambda expert: -wanted[expert])[: config.experts_per_token]
    weights = softmax(row[chosen]) if config.softmax_after_topk else scores[chosen]
    if config.renormalise:
        weights = weights / weights.sum()
    return chosen, weights * config.routed_scaling


EIGHT = replace(CONFIG, num_experts=8, experts_per_token=4)
ROUTERS = {
    "Qwen3-MoE": EIGHT,
    "OLMoE": replace(EIGHT, renormalise=False),
    "Mixtral": replace(EIGHT, softmax_after_topk=True),
    "DeepSeek-V2": replace(
        EIGHT,
        renormalise=False,
        num_expert_groups=4,
        expert_groups_per_token=2,
        routed_scaling=16.0,
    ),
    "DeepSeek-V3": replace(
        EIGHT,
        router_scores="sigmoid",
        selection_bias=True,
        num_expert_groups=4,
        expert_groups_per_token=2,
        routed_scaling=2.5,
    ),
    "sigmoid of one group": replace(EIGHT, router_scores="sigmoid", renormalise=False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_public_models(name):
    config, draw = ROUTERS[name], np.random.default_rng(8)
    logits = (2 * draw.normal(size=(40, 8))).astype(np.float32)
    # Large enough that it changes most choices.
    bias = draw.normal(size=8).astype(np.float32) if config.selection_bias else np.zeros(8)
    given = bias if config.selection_bias else None
    routing, probabilities = jax.device_get(route(logits, np.ones(40, bool), config, bias=given))
    changed = 0
    for token, row in enumerate(logits):
        chosen, weights = routed_by_hand(row, bias, config)
        assert routing.experts[token].tolist() == chosen
        # float32 exponentials: a few units in the seventh digit.
        np.testing.assert_allclose(routing.probs[token], weights, rtol=1e-5)
        changed += chosen != routed_by_hand(row, np.zeros(8), EIGHT)[0]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)
    if config.num_expert_groups > 1:
        assert changed > 10


@pytest.mark.parametrize("name", full_but(ROUTERS, "DeepSeek-V3"))
def test_the_kernel_routes_as_the_plain_router(name):
    """Padding included."""
    config, draw = ROUTERS[name], np.random.default_rng(8)
    logits = (2 * draw.normal(size=(40, 8))).astype(np.float32)
    multiplicity = (draw.random(40) < 0.7).astype(np.float32)
    bias = draw.normal(size=8).astype(np.float32) if config.selection_bias else None
    pull = draw.normal(size=(40, config.experts_per_token)).astype(np.float32)

    @partial(jit, static_argnums=0)
    def run(implementation, logits, multiplicity, bias, pull):
        def probs(logits):
            routing, probabilities, _ = counted_routing(
                logits, multiplicity, config, bias=bias, implementation=implementation
            )
            return routing.probs, (routing.experts, probabilities)

        out, back, rest = jax.vjp(probs, logits, has_aux=True)
        return out, *rest, *back(pull)

    found, expected = (
        run(name, logits, multiplicity, bias, pull) for name in ("interpreted", "plain")
    )
    np.testing.assert_array_equal(found[1], expected[1])
    # A few roundings of float32.
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_router_of_another_name_is_refused():
    logits, multiplicity = jnp.zeros((2, 8)), jnp.ones(2)
    with pytest.raises(
        ValueError, match=r"'triton' of route is not known: choose among 'mosaic', 'plain'"
    ):
        counted_routing(logits, multiplicity, EIGHT, implementation="triton")


def test_sigmoid_scores_that_vanish_still_have_weights():
    config = replace(ROUTERS["DeepSeek-V3"], selection_bias=False)
    logits = np.float32([[-200.0, -201.0, -202.0, -203.0, -300.0, -301.0, -302.0, -303.0]])
    routing, _ = route(logits, np.ones(1, bool), config)
    np.testing.assert_allclose(np.sum(routing.probs), 2.5, rtol=1e-6)


def test_bias_moves_choices_and_has_no_gradient():
    config = replace(EIGHT, router_scores="sigmoid", selection_bias=True)
    logits = np.random.default_rng(9).normal(size=(6, 8)).astype(np.float32)

    def output(bias, logits):
        routing, _ = topk_routing(logits, jnp.ones(6, bool), config, bias=bias)
        return jnp.sum(routing.probs * jnp.arange(4.0)[None, :]), routing.experts

    bias = np.float32([9.0] + 7 * [0.0])
    gradient, experts = jit(jax.grad(output, has_aux=True))(bias, logits)
    assert np.all(np.asarray(experts)[:, 0] == 0)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_replayed_choices_have_current_scores(name):
    config, draw = ROUTERS[name], np.random.default_rng(10)
    old, new = (draw.normal(size=(40, 8)).astype(np.float32) for _ in range(2))
    valid = np.arange(40) != 5
    everyone = np.ones(40, bool)

    def probs(logits, valid, recorded):
        routing, _ = topk_routing(logits, valid, config, replay=recorded)
        return routing.probs[0, 0], routing

    @jit
    def replay(logits, valid, recorded):
        """The gradient of the first weight, and the routing."""
        return jax.grad(probs, has_aux=True)(logits, valid, recorded)

    recorded, own, alone = (
        jax.device_get(route(*given, config)[0])
        for given in ((old, valid), (new, valid), (new, everyone))
    )
    recorded = recorded.experts
    _, again = replay(new, valid, own.experts)
    chex.assert_trees_all_equal(again, own)
    gradient, replayed = jax.device_get(replay(new, valid, recorded))
    np.testing.assert_array_equal(replayed.experts, recorded)
    assert np.any(recorded != own.experts)
    for token in np.flatnonzero(valid):
        row, chosen = new[token].astype(np.float64), recorded[token]
        every = softmax(row) if config.router_scores == "softmax" else 1 / (1 + np.exp(-row))
        expected = every[chosen] / (every[chosen].sum() if config.renormalise else 1)
        np.testing.assert_allclose(
            replayed.probs[token], expected * config.routed_scaling, rtol=1e-5
        )
    # What was padding when it was recorded chooses for itself.
    _, late = replay(new, everyone, recorded)
    np.testing.assert_array_equal(late.experts[5], alone.experts[5])
    # The gradient passes through the scores of the recorded experts.
    assert abs(gradient[0, recorded[0, 0]]) > 0
    np.testing.assert_array_equal(gradient[1:], 0)
