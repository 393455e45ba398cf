"""Conversations: whose tokens are whose, what is drawn, and what an answer costs."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import small_recipe
from talks import RESPONSE, LateHost, echo, talked, talking_setup, turns_of
from three_updates import random_weights

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import over_rows
from jrl.rollout.sampler import scores_of
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.learner.update import update
from jrl.trainer.scoring import logprobs_of
from jrl.trainer.state import init_state
from jrl.trainer.step import prepare


@pytest.fixture(scope="module")
def setup():
    return talking_setup()


@pytest.fixture(scope="module")
def weights(setup):
    return random_weights(setup, setup.model)


@pytest.fixture(scope="module")
def collected(setup, weights):
    return talked(setup, weights)


@pytest.mark.slow
def test_answers_stand_in_the_context_and_not_under_the_mask(setup, collected):
    batch, begin = to_host(collected.batch), setup.prompt_length
    encode = setup.tokenizer.encode
    assert sum(len(turns_of(c).answers) for c in collected.completions) > 5
    for row, completion in enumerate(collected.completions):
        turns = turns_of(completion)
        response = completion.trajectory.response
        said, place = list(turns.policy_messages), 0
        own = np.zeros(setup.prompt_length + RESPONSE, bool)
        # What the environment answers is known from what was said to it.
        for number, text in enumerate(said):
            end = turns.answers[number][0] if number < len(turns.answers) else len(response)
            own[begin + place : begin + end] = True
            if number < len(turns.answers):
                assert response[end - 1] == setup.tokenizer.eos_id
                answer = encode("h" * (1 + len(text) % 3) + ">")
                place = turns.answers[number][1]
                assert response[end:place].tolist() == answer
        assert batch.mask[row].tolist() == own.tolist()
        assert batch.valid[row].sum() == len(completion.trajectory.request.tokens) + len(response)
        for column in (batch.old_logprobs, batch.behaviour_logprobs):
            assert (column[row][own] < 0).all() and not column[row][~own].any()


@pytest.mark.slow
def test_the_trainer_gives_the_sampled_tokens_the_same_probabilities(setup, weights, collected):
    batch = collected.batch
    objective = setup.networks.policy.objective
    found = logprobs_of(objective, weights, batch.tokens, batch.valid)[0]
    # Float32 over rows of thirty tokens, prefilled again at each turn.
    difference = jnp.where(batch.mask, found - batch.old_logprobs, 0.0)
    assert float(jnp.abs(difference).max()) < 2e-5


@pytest.mark.slow
def test_what_is_drawn_depends_neither_on_slots_nor_on_when_answers_come(weights, collected):
    late = talking_setup(echo(host=LateHost), slots=3)
    again = talked(late, weights)
    for one, other in zip(collected.completions, again.completions, strict=True):
        assert one.text == other.text and one.verdict == other.verdict
        assert one.trajectory.response.tolist() == other.trajectory.response.tolist()
    for name in ("tokens", "mask", "valid"):
        found, expected = getattr(again.batch, name), getattr(collected.batch, name)
        assert np.array_equal(found, expected), name


@pytest.mark.slow
def test_turns_and_tokens_are_bounded(weights, collected):
    setup = talking_setup(max_turns=1)
    completions = talked(setup, weights).completions
    for one, whole in zip(completions, collected.completions, strict=True):
        assert len(turns_of(one).policy_messages) == 1
        assert one.text.split("\n")[0] == whole.text.split("\n")[0]
    bounded = [turns_of(c).turn_limit for c in completions]
    assert any(bounded) and not any(turns_of(c).turn_limit for c in collected.completions)
    assert max(c.length for c in collected.completions) <= RESPONSE
    truncated = [c for c in collected.completions if c.truncated]
    assert truncated and all(not c.correct or c.score >= 1 for c in truncated)


def test_rewards_lie_on_the_last_token_of_their_turn(setup, weights, collected):
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    completions = collected.completions
    scores = scores_of(completions)
    batch, _ = prepare(setup.networks, state, completions, scores, collected.batch)
    found = to_host(batch)
    assert np.allclose(found.rewards, scores, atol=1e-6)
    assert found.turn_rewards.any()
    for row, completion in enumerate(completions):
        turns = turns_of(completion)
        expected = np.zeros_like(found.turn_rewards[row])
        for (_, reward), (end, _) in zip(turns.rewards, turns.answers, strict=False):
            expected[setup.prompt_length + end - 1] = reward
        assert found.turn_rewards[row].tolist() == expected.tolist()
        assert turns.rewards == () or completion.score == sum(r for _, r in turns.rewards)


def gradient(setup, weights, batch):
    objective, optimizer = setup.networks.policy.objective, setup.networks.policy.optimizer
    learner = setup.networks.policy.init(weights)
    learner, _ = update(objective, optimizer, 2, learner, batch)
    leaves = jax.tree.leaves(learner.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    return jax.device_get(next(leaf.mu for leaf in leaves if hasattr(leaf, "mu")))


@pytest.mark.slow
def test_answers_cost_no_gradient_but_through_the_turns_after_them():
    setup = talking_setup(recipe=small_recipe(max_grad_norm=1e9))
    # Routers are balanced over all tokens; without that, what is left is the policy's loss.
    setup = replace(setup, model=replace(setup.model, load_balance_coef=0.0, router_z_coef=0.0))
    weights = random_weights(setup, setup.model)
    batch = to_host(talked(setup, weights).batch)
    letter, zero = setup.tokenizer.encode("h")[0], setup.tokenizer.encode("0")[0]
    # The letter is the environment's alone.
    tokens = np.where(batch.mask & (batch.tokens == letter), zero, batch.tokens)
    assert ((tokens == letter) & batch.valid).sum() > 4
    batch = replace(batch, tokens=tokens, truncated=None, turn_rewards=None)
    random = np.random.default_rng(2)
    advantages = random.uniform(0.5, 2.0, batch.mask.shape).astype(np.float32)

    def of(advantages, **changes):
        placed = replace(batch, advantages=advantages, **changes)
        return gradient(setup, weights, jax.device_put(placed, over_rows(setup.mesh)))

    def garbage(column):
        return np.where(batch.mask, column, random.uniform(-50, 50, column.shape)).astype(
            np.float32
        )

    whole = of(np.where(batch.mask, advantages, 0.0))
    other = of(
        garbage(advantages),
        old_logprobs=garbage(batch.old_logprobs),
        behaviour_logprobs=garbage(batch.behaviour_logprobs),
    )
    chex.assert_tree_all_finite(whole)
    chex.assert_trees_all_equal(whole, other)
    assert np.abs(whole.embedding[letter]).max() > 1e-6
    # The first turn has read no answer; nothing after it counts here.
    first = np.cumsum(~batch.mask & batch.valid, axis=1)
    prompt = (~batch.mask & batch.valid)[:, : setup.prompt_length].sum(axis=1, keepdims=True)
    before = of(np.where(batch.mask & (first == prompt), advantages, 0.0))
    assert not before.embedding[letter].any()
    assert np.abs(before.embedding).max() > 1e-6


def test_an_answer_that_cannot_be_written_ends_its_conversation_alone(weights, capsys):
    setup = talking_setup()
    # The environment's letter is not among the characters of this one.
    setup = replace(setup, tokenizer=Tokenizer.train_characters("012=>x"))
    completions = talked(setup, weights).completions
    reasons = {completion.verdict.reason for completion in completions}
    assert "invalid" in reasons and reasons <= {"invalid", "wrong"}
    assert "task=echo cannot be encoded (text has the character 'h'" in capsys.readouterr().err
