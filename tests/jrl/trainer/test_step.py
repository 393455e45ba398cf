"""From a batch to optimizer steps: which rows are learned from when, and what meets the host."""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    GROUP_SIZE,
    fresh_state,
    fresh_weights,
    small_batch,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.recipes import RECIPES
from jrl.rollout.decoding import mesh_backend
from jrl.trainer import step as stepping
from jrl.trainer.learner import update as of_update
from jrl.trainer.learner.metrics import Outcome
from jrl.trainer.scoring import logprobs_of
from jrl.trainer.step import mini_batches, sampling_difference, train_on_batch, train_step
from jrl.trainer.summary import summarise

ROWS = 8


def state_of(setup, step=0):
    state = fresh_state(setup, fresh_weights(setup))
    return state.replace(step=state.step + step)


def learn(setup, state, batch):
    return train_on_batch(setup.networks, state, batch, setup.randomness)


@pytest.fixture
def learned_from(monkeypatch):
    """The rows of each update, told by the tokens they begin with; nothing is updated."""
    updates: list[tuple[str, list[int]]] = []

    def record(
        objective, optimizer, num_micro, learner, batch, statistics, passes=None, frozen=None
    ):
        network = "critic" if objective.config.head == "value" else "actor"
        updates.append((network, np.asarray(batch.tokens)[:, 0].tolist()))
        return learner, Outcome(0.0, 0.0, True, False)

    monkeypatch.setattr(of_update, "update", record)
    return updates


def numbered(setup):
    """A batch of a whole step, with the number of each row for its first token."""
    batch = small_batch(setup, ROWS)
    return batch.replace(tokens=batch.tokens.at[:, 0].set(jnp.arange(ROWS, dtype=jnp.int32)))


def orders(learned_from, setup, step=0) -> Sequence[list[int]]:
    learned_from.clear()
    learn(setup, state_of(setup, step), numbered(setup))
    return [rows for network, rows in learned_from if network == "actor"]


def test_order_is_a_function_of_seed_step_and_epoch(learned_from):
    setup = small_setup(small_recipe(epochs=3))
    first = orders(learned_from, setup)
    assert [len(rows) for rows in first] == [4] * 6
    epochs = [first[i] + first[i + 1] for i in (0, 2, 4)]
    assert all(sorted(rows) == list(range(ROWS)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert orders(learned_from, setup) == first
    assert orders(learned_from, setup, step=1) != first
    other = small_setup(small_recipe(epochs=3), small_run(seed=1))
    assert orders(learned_from, other) != first
    # Fewer epochs are the beginning of more.
    assert orders(learned_from, small_setup(small_recipe(epochs=1))) == first[:2]


def test_rows_that_share_a_prompt_stay_together(learned_from):
    setup = small_setup(small_recipe(epochs=4))
    assert setup.geometry.prompt_layout.group_size == GROUP_SIZE
    for rows in orders(learned_from, setup):
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(rows[::2], rows[1::2], strict=True))


def test_rows_go_alone_where_a_mini_batch_holds_no_whole_groups(learned_from):
    setup = small_setup(small_recipe(epochs=4, group_size=4, prompts=2, mini_batch=2))
    assert setup.geometry.prompt_layout.group_size == 1
    rows = orders(learned_from, setup)
    assert any(part[0] // 4 != part[1] // 4 for part in rows)


def test_micro_batches_have_no_say_in_the_mini_batches(learned_from):
    setup = small_setup()
    state, batch = state_of(setup), numbered(setup)
    for group_size, mini_batch in ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8)):
        found = []
        for micro_batch in [None, *(size for size in (1, 2, 4, 8) if mini_batch % size == 0)]:
            sizes = {"group_size": group_size, "prompts": ROWS // group_size, "epochs": 2}
            recipe = small_recipe(**sizes, mini_batch=mini_batch, micro_batch=micro_batch)
            learned_from.clear()
            learn(small_setup(recipe), state, batch)
            found.append([rows for _, rows in learned_from])
        assert [len(rows) for rows in found[0]] == [mini_batch] * (2 * ROWS // mini_batch)
        assert all(rows == found[0] for rows in found)


def test_the_default_step_shuffles_whole_groups():
    """64 prompts x 8 in mini-batches of 128: sixteen groups each, drawn as numpy permutes rows."""
    recipe = RECIPES["grpo"]()
    found = mini_batches(recipe, np.random.default_rng([0, 3, 0]))
    expected = np.random.default_rng([0, 3, 0]).permutation(np.arange(512).reshape(64, 8))
    np.testing.assert_array_equal(found, expected.reshape(4, 128))


@pytest.mark.slow
def test_micro_batches_have_no_say_in_what_is_learned():
    """A whole step in micro-batches of 4 rows and of 1, which holds no whole group."""
    steps = []
    for micro_batch in (4, 1):
        setup = small_setup(small_recipe(micro_batch=micro_batch))
        state, history, *_ = learn(setup, state_of(setup), small_batch(setup, ROWS))
        steps.append((jax.device_get(state.policy.weights), summarise(history)))
    (weights, metrics), (other_weights, other_metrics) = steps
    # Float32 sums in another order, divided by their own size where Adam's gradients are small.
    chex.assert_trees_all_close(other_weights, weights, rtol=1e-4, atol=2e-5)
    assert other_metrics.keys() == metrics.keys()
    for name in metrics.keys() - {"moe/padded_fraction"}:  # rows that share a prompt run it once
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("step", [0, 1])
def test_critic_and_policy_take_turns_after_pretraining(learned_from, step):
    setup = small_setup(small_recipe("vapo", pretrain_critic=1))
    learn(setup, state_of(setup, step), numbered(setup))
    networks = [network for network, _ in learned_from]
    assert networks == (["critic"] * 2 if step == 0 else ["critic", "actor"] * 2)
    critic = [rows for network, rows in learned_from if network == "critic"]
    actor = [rows for network, rows in learned_from if network == "actor"]
    assert not actor or actor == critic


def test_critic_and_policy_have_masks_of_their_own(monkeypatch):
    """Each network's update is given the tokens that count for it."""
    seen = {}

    def record(
        objective, optimizer, num_micro, learner, batch, statistics, passes=None, frozen=None
    ):
        seen.setdefault(objective.config.head != "value", []).append(np.asarray(batch.mask))
        return learner, Outcome(0.0, 0.0, True, False)

    monkeypatch.setattr(of_update, "update", record)
    setup = small_setup(small_recipe("ppo"))
    batch = small_batch(setup, ROWS)
    learn(setup, state_of(setup), batch.replace(critic_mask=~batch.mask))
    of_policy, of_critic = (np.concatenate(seen[is_policy]) for is_policy in (True, False))
    assert of_policy.any() and not of_policy.all()
    np.testing.assert_array_equal(of_critic, ~of_policy)


def test_what_was_left_out_is_handed_over(learned_from, monkeypatch):
    def refuse(*arguments):
        loss = np.float32(np.nan)
        return arguments[3], Outcome(loss, 2.0, False, False)

    monkeypatch.setattr(of_update, "update", refuse)
    setup = small_setup(small_recipe("vapo", pretrain_critic=0))
    _, history, nonfinite, _ = learn(setup, state_of(setup), numbered(setup))
    assert len(history) == 2
    assert [left_out.network for left_out in nonfinite] == ["critic", "actor"] * 2
    assert nonfinite[0].grad_norm == 2.0 and np.isnan(nonfinite[0].loss)
    assert nonfinite[0].batch.tokens.shape[0] == 4


@pytest.fixture
def fetched(monkeypatch):
    """Shape and kind of every array that is read on the host."""
    shapes: list[tuple[tuple[int, ...], str]] = []
    array = type(jnp.zeros(1))
    read = array._value.fget

    def recorded(self):
        shapes.append((self.shape, self.dtype.kind))
        return read(self)

    monkeypatch.setattr(array, "_value", property(recorded))
    return shapes


REPORTS = ["b", "b", "f"]
"""Of what has a number for each token, what a step's report is made of on the host: the mask, what
is padding, and the advantages."""


@pytest.fixture
def looks(monkeypatch):
    """The times that sampled tokens come to the host, a number for each."""
    times, shelved = [], mesh_backend.write_to_buffer

    def counted(*arguments):
        times.append(len(times))
        return shelved(*arguments)

    monkeypatch.setattr(mesh_backend, "write_to_buffer", counted)
    return times


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "tp2 dp2 / ep4"])
def test_a_dapo_step_crosses_for_texts_scores_and_reports_only(fetched, layout, looks):
    """Of what has a number for each token no log-probabilities, and nothing twice."""
    recipe = small_recipe("dapo", max_generation_rounds=2)
    setup = small_setup(recipe, small_run(layout=layout))
    state, sampler = fresh_state(setup, fresh_weights(setup)), setup.sampler()
    fetched.clear()
    _, done = train_step(sampler, setup.networks, state, setup.randomness)
    assert done.metrics["dynamic_sampling/prompts_generated"] >= 4
    texts = ["i"] * len(looks)  # sampled tokens, whenever rows have ended
    assert of_tokens(fetched) == sorted([*texts, *REPORTS])


def of_tokens(fetched) -> list[str]:
    """The kinds of what was read that has a number for each token, sorted."""
    return sorted(kind for shape, kind in fetched if len(shape) == 2 and shape[1] >= 11)


@pytest.mark.slow
def test_what_differs_from_the_sampler_is_reduced_on_the_mesh(fetched):
    setup = small_setup()
    state, batch = state_of(setup), small_batch(setup, ROWS)
    rows = batch.tokens, batch.valid
    _, again = logprobs_of(setup.networks.policy.objective, state.policy.weights, *rows)
    far = np.abs(np.asarray(again) - np.asarray(batch.behaviour_logprobs))[np.asarray(batch.mask)]
    fetched.clear()
    found = sampling_difference(setup.networks, state, batch)
    assert of_tokens(fetched) == []
    name = "sampling/sampling_logp_difference"
    # A sum of 32 numbers in float32, in another order.
    assert found[f"{name}/mean"] == pytest.approx(far.mean(), rel=1e-5)
    assert found[f"{name}/max"] == far.max() > 0
    nothing = batch.replace(mask=jnp.zeros_like(batch.mask))
    assert sampling_difference(setup.networks, state, nothing) == {}


@pytest.mark.slow
def test_a_step_of_the_critic_alone_crosses_for_no_log_probabilities(fetched, looks):
    """No more than a step of the policy does."""
    recipe = small_recipe("vapo", pretrain_critic=2)
    setup = small_setup(recipe, small_run(warm_start_steps=0))
    state, sampler = fresh_state(setup, fresh_weights(setup)), setup.sampler()
    fetched.clear()
    _, done = train_step(sampler, setup.networks, state, setup.randomness)
    assert 0 <= done.metrics["sampling/sampling_logp_difference/max"] < 1e-5
    texts = ["i"] * len(looks)
    assert of_tokens(fetched) == sorted([*texts, *REPORTS])


class Handed(Exception):
    """What `prepare` was given."""


@pytest.mark.slow
def test_shuffled_rewards(monkeypatch):
    """The same scores, dealt out by seed and step."""

    def hand_over(networks, state, completions, scores, *_):
        raise Handed(np.arange(8) / 8, scores)

    monkeypatch.setattr(stepping, "prepare", hand_over)
    monkeypatch.setattr(stepping, "scores_of", lambda _: np.arange(8) / 8)
    setup = small_setup()
    sampler = setup.sampler()

    def scores(step, shuffled):
        state = state_of(setup, step)
        fixed = (sampler, setup.networks, state, setup.randomness)
        with pytest.raises(Handed) as handed:
            train_step(*fixed, shuffle_rewards=shuffled)
        return handed.value.args

    true, plain = scores(0, False)
    np.testing.assert_array_equal(plain, true)
    (_, once), (_, again) = scores(0, True), scores(0, True)
    np.testing.assert_array_equal(np.sort(once), np.sort(true))
    assert not np.array_equal(once, true)
    np.testing.assert_array_equal(once, again)
