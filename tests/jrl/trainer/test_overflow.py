"""Updates and scoring passes without room for what routers chose: made again, and nothing lost."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    fresh_state,
    one_step,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from three_updates import random_weights

from jrl.config.run import RunConfig
from jrl.recipes import Grpo
from jrl.report.metrics import check_defined, without_timings
from jrl.trainer.learner.update import update
from jrl.trainer.scoring import (
    logprobs_and_choices_of,
    logprobs_and_entropy_of,
    logprobs_of,
    packed_scores,
    values_of,
)
from jrl.trainer.setup.setup import build_setup
from moe.execution import Execution

ROWS = 8
# Of 128 places, 38 tokens with two choices each: 76 rows, and room for 32.
TOO_LITTLE = 0.25


def setup_on(layout, buffer_factor, **changes):
    recipe = small_recipe("ppo", mini_batch=8, micro_batch=8, **changes)
    setup = small_setup(recipe, small_run(layout=layout))
    execution = Execution(buffer_factor=buffer_factor)
    layers = {"num_layers": max(1, setup.mesh.layout.pp)}
    model = small_model(setup.tokenizer.vocab_size, execution=execution, **layers)
    return replace(setup, model=model)


def weights_of(setup, config, to_one_device):
    """Random ones; a router that says the same of all experts sends every token to the first."""
    weights = random_weights(setup, config)
    if not to_one_device:
        return weights
    experts = weights.layers.experts
    experts = replace(experts, router=jnp.zeros_like(experts.router))
    return replace(weights, layers=replace(weights.layers, experts=experts))


def updated(setup, network, to_one_device=True):
    learner = network.init(weights_of(setup, network.config, to_one_device))
    return jax.device_get(network.update(learner, small_batch(setup, ROWS)))


LAYOUTS = [
    ("dp1", TOO_LITTLE),
    ("tp2 dp2 / ep2 etp2", 1.0),  # one of the devices gets all
    ("pp2 dp2 / ep2", 0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "factor"), LAYOUTS)
def test_an_update_without_room_is_made_again_with_it(layout, factor):
    """Bit for bit the update of a program that has room for any routing."""
    setup, roomy = setup_on(layout, factor), setup_on(layout, None)
    learner, outcome = updated(setup, setup.networks.policy)
    expected, expected_outcome = updated(roomy, roomy.networks.policy)
    assert outcome.overflow > 0
    chex.assert_trees_all_equal(learner, expected)
    chex.assert_trees_all_equal(outcome.replace(overflow=None), expected_outcome)
    assert expected.updates == 1


@pytest.mark.slow
def test_what_had_no_room_moves_nothing():
    setup = setup_on("dp1", TOO_LITTLE)
    network, batch = setup.networks.policy, small_batch(setup, ROWS)
    weights = weights_of(setup, network.config, to_one_device=True)
    before = jax.device_get(network.init(weights))
    learner, metrics = update(network.objective, network.optimizer, 1, network.init(weights), batch)
    chex.assert_trees_all_equal(learner, before)
    # 38 tokens with two choices each.
    assert int(metrics.overflow) == 76 - 32
    assert metrics.finite


@pytest.mark.slow
def test_an_update_with_room_enough_is_not_repeated():
    setup, roomy = setup_on("dp2 / ep2", 1.5), setup_on("dp2 / ep2", None)
    learner, metrics = updated(setup, setup.networks.policy, to_one_device=False)
    expected, _ = updated(roomy, roomy.networks.policy, to_one_device=False)
    assert metrics.overflow == 0
    # The same products in buffers of other lengths: the last digits of float32.
    chex.assert_trees_all_close(learner, expected, rtol=1e-5, atol=1e-6)


def scored(setup):
    """By every pass that has no gradient."""
    networks, batch = setup.networks, small_batch(setup, ROWS)
    policy, critic = networks.policy.objective, networks.critic.objective
    rows = batch.tokens, batch.valid
    of_policy, of_critic = (
        weights_of(setup, objective.config, to_one_device=True) for objective in (policy, critic)
    )
    return jax.device_get(
        (
            logprobs_of(policy, of_policy, *rows),
            logprobs_and_choices_of(policy, of_policy, *rows),
            logprobs_and_entropy_of(policy, of_policy, *rows),
            values_of(critic, of_critic, *rows),
            packed_scores(policy, of_policy, batch, 1),
            packed_scores(critic, of_critic, batch, 1),
        )
    )


@pytest.mark.slow
def test_scores_do_not_depend_on_room():
    setup = setup_on("dp2 / ep2", 1.0)
    found = scored(setup)
    chex.assert_trees_all_equal(found, scored(setup_on("dp2 / ep2", None)))
    # The first attempt at each would have given something else.
    policy, batch = setup.networks.policy.objective, small_batch(setup, ROWS)
    weights = weights_of(setup, policy.config, to_one_device=True)
    first, overflow = logprobs_of.with_overflow(policy, weights, batch.tokens, batch.valid)
    assert int(overflow) > 0
    assert np.abs(np.asarray(first[0]) - found[0][0]).max() > 1e-3


@pytest.mark.slow
def test_a_step_counts_its_repeated_updates():
    """Rollout, scoring and updates of policy and critic, all with too little room for most."""
    done = []
    for factor in (TOO_LITTLE, None):
        setup = setup_on("dp1", factor, kl_coef=0.1, old_logprobs="recompute")
        state = fresh_state(setup, weights_of(setup, setup.model, to_one_device=False))
        state, step = one_step(setup, state)
        check_defined(step.metrics)
        done.append((jax.device_get(state), without_timings(step.metrics)))
    (state, metrics), (expected, expected_metrics) = done
    chex.assert_trees_all_equal(state, expected)
    assert metrics.pop("training/overflow_repeated") == 2
    assert metrics.pop("moe/overflow") > 0
    assert metrics == expected_metrics


def test_a_flag_of_a_run_reaches_the_network():
    setup = build_setup(RunConfig(buffer_factor=1.5), Grpo())
    assert setup.networks.policy.objective.config.execution.buffer_factor == 1.5
    setup.task.close()
    with pytest.raises(
        ValueError, match=r"buffer_factor=2.0 changes nothing: .* tiny-dense has no"
    ):
        build_setup(RunConfig(model="tiny-dense", buffer_factor=2.0), Grpo())
    assert Execution(buffer_factor=0.0) == Execution()
    with pytest.raises(ValueError, match=r"buffer_factor=-1.0 must not be negative: 1 fits"):
        Execution(buffer_factor=-1.0)
