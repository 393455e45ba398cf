"""A critic on held-out prompts: its report is made of the returns that it is trained on."""

import numpy as np
import pytest
from small_runs import small_recipe
from talks import RESPONSE, talking_setup
from three_updates import random_weights

from jrl.losses import gae
from jrl.processes.agreement import to_host
from jrl.rollout.collection.collect import batch_from_host, groups_of, sampling_of
from jrl.rollout.decoding.requests import move_to_host
from jrl.rollout.sampler import numbered_heldout, scores_of
from jrl.trainer.evaluation.evaluate import evaluate_critic, heldout_examples
from jrl.trainer.state import init_state
from jrl.trainer.step import prepare

PROMPTS, K = 4, 2


@pytest.mark.slow
def test_turns_of_a_conversation_keep_their_rewards():
    """Returns and advantages of the report equal a step's on the same completions."""
    recipe = small_recipe("vapo", gamma=0.9, whiten_advantages=False)
    setup = talking_setup(recipe=recipe)
    weights = random_weights(setup, setup.model)
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    sampler, network = setup.sampler(), setup.networks.critic
    sampler.engine.load(weights, 0)
    how = sampling_of(recipe)
    found = evaluate_critic(sampler, network, state.critic.weights, how, num_prompts=PROMPTS, k=K)

    examples = numbered_heldout(heldout_examples(setup.task, PROMPTS))
    completions = sampler.sample(examples, how, K)
    everything, pad = np.ones(len(completions), bool), setup.tokenizer.pad_id
    trajectories = move_to_host([completion.trajectory for completion in completions])
    batch = batch_from_host(
        trajectories, everything, setup.mesh, setup.prompt_length, RESPONSE, pad, 0
    )
    scores = scores_of(completions)
    batch = prepare(setup.networks, state, completions, scores, batch)[0]
    trained = to_host(batch)
    assert trained.turn_rewards.any() and (trained.valid & ~trained.mask).any()
    np.testing.assert_array_equal(found.groups, -1 - groups_of(completions))
    np.testing.assert_array_equal(found.mask, trained.mask)
    # Float32, the critic's values by programs of other sizes.
    close = {"rtol": 1e-5, "atol": 1e-5}
    for lam, which, expected in ((1.0, 1, trained.returns), (found.lam, 0, trained.advantages)):
        of_report = gae(found.rewards, found.values, found.mask, gamma=found.gamma, lam=lam)[which]
        np.testing.assert_allclose(of_report, np.where(found.mask, expected, 0), **close)
