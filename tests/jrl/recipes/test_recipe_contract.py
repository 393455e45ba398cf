"""The contract of recipes with the trainer: the library's, and two that are defined here."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from small_runs import fresh_state, fresh_weights, one_step, small_batch, small_run, small_setup
from three_updates import random_weights
from tiers import full_but

from jrl import Mean, sapo_loss
from jrl.recipes import RECIPES, Batch, GroupRelative, Metrics, Recipe, Targets
from jrl.report.metrics import check_defined
from jrl.trainer.learner.update import count, policy_loss, statistics_of

ROWS, PROMPT, TIME = 6, 2, 7
LENGTHS = np.array([5, 1, 3, 0, 2, 4])
COLUMNS = np.arange(TIME)[None, :]
MASK = (COLUMNS >= PROMPT) & (PROMPT + LENGTHS[:, None] > COLUMNS)
SIZES = {"prompts": 4, "group_size": 2, "mini_batch": 4, "learning_rate": 1e-2}


@dataclass(frozen=True)
class Sapo(GroupRelative):
    """SAPO as its users would write it."""

    tau_negative: float = 1.05
    """Temperature where the advantage is negative."""

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        return sapo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            tau_negative=self.tau_negative,
            aggregation=None,
        )


@dataclass(frozen=True)
class Toy(Recipe):
    """Every hook at once: masks of its own, statistics of the mini-batch, metrics of its own."""

    uses_statistics: ClassVar[bool] = True
    metrics: ClassVar = {"actor/mean_logprob": "Mean log-probability of the mini-batch, nats."}

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        advantages = jnp.where(batch.mask, batch.rewards[:, None] - 0.5, 0.0)
        longest = jnp.max(batch.lengths)
        return Targets(advantages, mask=batch.mask & (batch.lengths < longest)[:, None])

    def statistics(self, logprobs, entropy, batch):
        total = jnp.sum(jnp.where(batch.mask, logprobs, 0.0))
        return total / jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32)), 1)

    def surrogate(self, logprobs, entropy, batch, statistics):
        centred = jnp.where(batch.mask, logprobs - statistics, 0.0)
        own = Mean.of(jnp.broadcast_to(statistics, batch.mask.shape), batch.mask)
        return -batch.advantages * centred, {"mean_logprob": own}

    def auxiliary_loss(self, logprobs, batch, totals):
        squares = jnp.where(batch.mask, logprobs**2, 0.0)
        return 0.01 * jnp.sum(squares) / totals.num_tokens.astype(jnp.float32), {}


KINDS = {**RECIPES, "sapo": Sapo, "toy": Toy}
# Group-relative, with a critic, in windows, with statistics, and one with every hook.
QUICK = ("grpo", "vapo", "tppo", "hapo", "toy")
every_recipe = pytest.mark.parametrize("name", full_but(KINDS, *QUICK))


def batch(under_mask=0.0):
    random = np.random.default_rng(3)

    def numbers(low, high):
        array = random.uniform(low, high, (ROWS, TIME)).astype(np.float32)
        return np.where(MASK, array, np.float32(under_mask))

    return Batch(
        tokens=np.zeros((ROWS, TIME), np.int32),
        valid=MASK | (COLUMNS < PROMPT),
        mask=MASK,
        behaviour_logprobs=numbers(-2, 0),
        old_logprobs=numbers(-2, 0),
        truncated=LENGTHS == 5,
        groups=np.array([7, 7, 7, 3, 3, 3], np.int32),
        lengths=LENGTHS.astype(np.int32),
        rewards=np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.0], np.float32),
        correct=np.array([True, False, False, True, False, False]),
        old_values=numbers(-1, 1),
        logprobs={"reference": numbers(-2, 0)},
    )


def with_targets(recipe, given):
    """The batch with what the recipe makes of it, and those targets."""
    targets = recipe.targets(given)
    mask = given.mask if targets.mask is None else targets.mask
    known = {"advantages": targets.advantages, "returns": targets.returns}
    return replace(given, mask=mask, critic_mask=targets.critic_mask, **known), targets


def totals_of(recipe, given, logprobs, entropy):
    """Denominators and statistics of a mini-batch."""
    if not recipe.uses_statistics:
        return count(given)
    return count(given, jax.lax.stop_gradient(recipe.statistics(logprobs, entropy, given)))


def loss_of(recipe, given, logprobs, entropy, totals=None):
    """The policy's loss, with the mini-batch's own totals if there are none yet."""
    totals = totals_of(recipe, given, logprobs, entropy) if totals is None else totals
    return policy_loss(recipe, logprobs, entropy, given, totals, TIME - PROMPT)


def in_micro_batches(recipe, given, logprobs, entropy):
    """Losses of three micro-batches, with denominators and statistics of the whole mini-batch."""
    totals, found = totals_of(recipe, given, logprobs, entropy), []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        micro_batch = jax.tree.map(lambda x, rows=rows: x[rows], given)
        found.append(loss_of(recipe, micro_batch, logprobs[rows], entropy[rows], totals))
    return found


class Outcome(NamedTuple):
    """What a recipe makes of the batch.

    Attributes:
      mask: of the tokens that its policy learns from.
      targets: of the batch.
      whole: its loss and metrics.
      slope: the gradient of the loss by the log-probabilities.
      parts: losses and metrics of micro-batches.
    """

    mask: Any
    targets: Targets
    whole: tuple[Any, Metrics]
    slope: Any
    parts: list[tuple[Any, Metrics]]


@cache
def program(name):
    """All that is asked of a recipe here, compiled once."""
    recipe = KINDS[name]().fitted(TIME - PROMPT)

    @jax.jit
    def run(given, logprobs, entropy):
        given, targets = with_targets(recipe, given)
        loss = partial(loss_of, recipe, given)
        whole, slope = jax.value_and_grad(loss, has_aux=True)(logprobs, entropy)
        parts = in_micro_batches(recipe, given, logprobs, entropy)
        return Outcome(given.mask, targets, whole, slope, parts)

    return run


@cache
def outcome(name, under_mask=0.0):
    random = np.random.default_rng(4)
    logprobs = random.uniform(-2, 0, (ROWS, TIME)).astype(np.float32)
    entropy = random.uniform(0.1, 2, (ROWS, TIME)).astype(np.float32)
    logprobs = np.where(MASK, logprobs, np.float32(under_mask))
    return jax.device_get(program(name)(batch(under_mask), logprobs, entropy))


@pytest.mark.slow
@every_recipe
def test_targets_are_numbers_for_the_sampled_tokens(name):
    found = outcome(name)
    targets = found.targets
    assert targets.advantages.shape == (ROWS, TIME)
    assert not np.any(targets.advantages[~MASK])
    assert (targets.returns is None) == (not KINDS[name].uses_critic)
    for mask in (targets.mask, targets.critic_mask):
        assert mask is None or not np.any(mask & ~MASK)
    # A recipe without rewards has the teacher's term alone, which the trainer adds.
    assert np.any(targets.advantages[found.mask]) == KINDS[name].uses_rewards


@pytest.mark.slow
@every_recipe
def test_what_is_under_the_mask_changes_nothing(name):
    clean, poisoned = (
        (found.targets.advantages, found.whole[0], found.slope)
        for found in (outcome(name), outcome(name, under_mask=np.nan))
    )
    chex.assert_trees_all_equal(clean, poisoned)
    assert not np.any(clean[2][~MASK])


@pytest.mark.parametrize("name", full_but(KINDS, "vapo", "toy"))
def test_a_loss_is_the_sum_over_its_pieces(name):
    """With denominators and statistics of the whole mini-batch, however it is cut."""
    found = outcome(name)
    whole, metrics = found.whole
    # float32 sums of a few tens of terms, in another order.
    summed = sum(float(loss) for loss, _ in found.parts)
    np.testing.assert_allclose(summed, whole, rtol=2e-5, atol=1e-6)
    assert all(part.keys() == metrics.keys() for _, part in found.parts)
    check_defined(metrics, KINDS[name].metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Sapo, Toy])
def test_a_recipe_of_ones_own_takes_a_step(kind):
    """In micro-batches of four rows and of two: statistics cover the mini-batch."""
    found = []
    for micro_batch in (4, 2):
        recipe = kind(**SIZES, micro_batch=micro_batch)
        setup = small_setup(recipe, small_run(warm_start_steps=0))
        state = fresh_state(setup, fresh_weights(setup))
        before = jax.device_get(state.policy.weights)
        state, done = one_step(setup, state)
        check_defined(done.metrics, recipe.metrics)
        assert int(state.policy.updates) == 2
        assert not np.array_equal(before.embedding, state.policy.weights.embedding)
        found.append((done.metrics["actor/loss"], done.metrics["actor/grad_norm"]))
    # float32 sums in another order.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.slow
def test_statistics_come_through_a_pipeline():
    found = []
    for layout in ("dp1", "pp2"):
        setup = small_setup(Toy(**SIZES, micro_batch=2), small_run(layout=layout))
        setup = replace(setup, model=replace(setup.model, num_layers=2))
        batch, policy = small_batch(setup, 4), setup.networks.policy
        weights = random_weights(setup, setup.model)
        statistics = statistics_of(policy.objective, weights, batch)
        _, metrics = policy.update(policy.init(weights), batch, statistics)
        found.append((float(statistics), float(metrics.loss), float(metrics.grad_norm)))
    # float32 sums in another order.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
