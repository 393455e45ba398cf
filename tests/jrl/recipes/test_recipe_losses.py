"""The policy loss of each recipe: against oracles, and the same however a mini-batch is cut."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiers import full_but

from jrl import aggregate, cispo_loss, gspo_loss, ppo_loss
from jrl.recipes import (
    RECIPES,
    ActorCritic,
    Batch,
    Cispo,
    Dapo,
    Grpo,
    Gspo,
    Ppo,
    Recipe,
    Tppo,
    Vapo,
)
from jrl.trainer.learner.update import count, policy_loss

ROWS, TIME = 6, 7
LIMIT = TIME - 2
# Lengths that differ, a row that does not count at all, and prompts of two columns.
MASK = (np.arange(TIME)[None, :] >= 2) & (
    np.arange(TIME)[None, :] < 2 + np.array([5, 1, 3, 0, 2, 4])[:, None]
)
CORRECT = np.array([True, False, True, True, False, False])
SIZES = {"prompts": 3, "group_size": 2, "mini_batch": 6, "micro_batch": 2}
MICRO_BATCHES = [slice(0, 1), slice(1, 4), slice(4, 6)]


def random(seed, low, high):
    return np.random.default_rng(seed).uniform(low, high, (ROWS, TIME)).astype(np.float32)


LOGPROBS, ENTROPY, VALUES = random(1, -2, 0), random(2, 0.1, 2), random(3, -1, 1)


def batch():
    """Old log-probabilities near enough and far enough for every clip; NaN outside the mask."""
    arrays = {
        "old_logprobs": LOGPROBS + random(4, -0.6, 0.6),
        "reference": LOGPROBS + random(5, -1, 1),
        "advantages": random(6, -2, 2),
        "returns": random(7, -1, 1),
        "old_values": VALUES + random(8, -1, 1),
    }
    arrays = {name: np.where(MASK, array, np.nan) for name, array in arrays.items()}
    return Batch(
        tokens=np.zeros((ROWS, TIME), np.int32),
        valid=MASK | (np.arange(TIME) < 2),
        mask=MASK,
        behaviour_logprobs=arrays["old_logprobs"],
        correct=CORRECT,
        logprobs={"reference": arrays.pop("reference")},
        **arrays,
    )


EVERY_TERM = {
    "entropy_coef": 0.3,
    "kl_coef": 0.7,
    "clip_dual": 1.5,
    "aggregation": "seq-mean-token-mean",
}


def every_term(kind):
    """Terms of a recipe: `clip_dual` only if its loss takes it."""
    takes = kind.surrogate is not Recipe.surrogate or "clip_dual" in kind().policy_loss_settings
    return {name: value for name, value in EVERY_TERM.items() if takes or name != "clip_dual"}


CASES = [kind(**SIZES, **t) for kind in RECIPES.values() for t in ({}, every_term(kind))]


def label(recipe):
    return recipe.name + ("" if recipe.kl_coef is None else " with every term")


def statistics_of(recipe, logprobs, entropy):
    """Of the mini-batch, where the recipe asks for them."""
    if not recipe.uses_statistics:
        return None
    return jax.lax.stop_gradient(recipe.statistics(logprobs, entropy, batch()))


def whole(recipe, logprobs, entropy):
    given, statistics = batch(), statistics_of(recipe, logprobs, entropy)
    return policy_loss(recipe, logprobs, entropy, given, count(given, statistics), LIMIT)


whole_compiled = jax.jit(whole, static_argnums=0)


def in_pieces(recipe, logprobs, entropy):
    """The sum over micro-batches of the loss, and of each metric."""
    given = batch()
    totals = count(given, statistics_of(recipe, logprobs, entropy))
    losses, metrics = [], []
    for own_rows in MICRO_BATCHES:
        rows = jax.tree.map(lambda x, own_rows=own_rows: x[own_rows], given)
        own = logprobs[own_rows], entropy[own_rows]
        loss, metric = policy_loss(recipe, *own, rows, totals, LIMIT)
        losses.append(loss)
        metrics.append(metric)
    return sum(losses[1:], losses[0]), jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *metrics)


def test_totals():
    totals = count(batch())
    # An empty row is no sequence, and its being correct adds no token.
    assert [int(x) for x in jax.tree.leaves(totals)] == [15, 5, 8, 15 + 2 * ROWS]


# Without the terms: tests/jrl/recipes/test_recipe_contract.py.
# Of every recipe, without these terms, `test_recipe_contract.py` asks it too.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", full_but(CASES[1::2], *CASES[1::12]), ids=label)
def test_pieces_add_up(recipe):
    def gradient_of(loss):
        step = jax.value_and_grad(loss, argnums=(1, 2), has_aux=True)
        return jax.jit(step, static_argnums=0)(recipe, LOGPROBS, ENTROPY)

    (loss, metrics), gradients = gradient_of(whole)
    (summed, summed_metrics), summed_gradients = gradient_of(in_pieces)
    # float32 sums of a few tens of terms, in another order.
    np.testing.assert_allclose(summed, loss, rtol=1e-5)
    for gradient, expected in zip(summed_gradients, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(np.asarray(gradient)[~MASK], 0.0)
    assert summed_metrics.keys() == metrics.keys()
    chex.assert_trees_all_close(summed_metrics, metrics, rtol=1e-5, atol=1e-6)


CLIPPED = [
    recipe
    for recipe in CASES
    if type(recipe).surrogate is Recipe.surrogate and recipe.policy_loss is ppo_loss
]


@pytest.mark.parametrize("recipe", CLIPPED, ids=label)
def test_against_oracles(recipe):
    given = batch()
    loss, metrics = whole_compiled(recipe, LOGPROBS, ENTROPY)
    surrogate, _, acts = oracles.ppo(
        LOGPROBS,
        given.old_logprobs,
        given.advantages,
        MASK,
        recipe.clip_low,
        recipe.clip_high,
        recipe.clip_dual,
    )
    mode, length = recipe.aggregation, {"max_length": LIMIT}
    expected = policy_gradient = oracles.aggregate(surrogate, MASK, mode, **length)
    if recipe.entropy_coef is not None:
        expected -= recipe.entropy_coef * oracles.aggregate(ENTROPY, MASK, mode, **length)
    if recipe.kl_coef is not None:
        k3 = np.zeros(MASK.shape)
        for row, times in enumerate(oracles.rows(MASK)):
            for t in times:
                log_ratio = float(LOGPROBS[row, t] - given.reference_logprobs[row, t])
                k3[row, t], _ = oracles.kl_token(log_ratio, "k3")
        expected += recipe.kl_coef * oracles.aggregate(k3, MASK, mode, **length)
        np.testing.assert_allclose(metrics["actor/kl_loss"].value(), k3[MASK].mean(), rtol=1e-5)
    if isinstance(recipe, Tppo | Vapo):
        imitated = MASK & CORRECT[:, None]
        # A mean over the tokens of correct rows, whatever the aggregation of the rest.
        likelihood = -LOGPROBS[imitated].mean()
        expected += recipe.positive_coef * likelihood
        np.testing.assert_allclose(metrics["actor/positive_loss"].value(), likelihood, rtol=1e-5)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)  # float32 against float64
    np.testing.assert_allclose(metrics["actor/pg_loss"], policy_gradient, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/entropy"].value(), ENTROPY[MASK].mean(), rtol=1e-5)
    clipped = np.isin(acts[MASK], ["clip"]).mean()
    assert clipped > 0.1
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"].value(), clipped, rtol=1e-5)


def loss_of(recipe):
    loss, metrics = whole_compiled(recipe, LOGPROBS, ENTROPY)
    return float(loss), metrics


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Grpo, Ppo, Dapo, Vapo])
def test_none_is_off_and_zero_is_a_weight(kind):
    off, metrics = loss_of(kind(**SIZES))
    assert "actor/kl_loss" not in metrics
    zero, metrics = loss_of(kind(**SIZES, kl_coef=0.0, entropy_coef=0.0))
    # Two programs, whose sums the compiler may order differently.
    np.testing.assert_allclose(zero, off, rtol=1e-6)
    assert float(metrics["actor/kl_loss"].value()) > 0
    assert loss_of(kind(**SIZES, kl_coef=0.5))[0] > off
    assert loss_of(kind(**SIZES, entropy_coef=0.5))[0] < off


def test_vapo_without_imitation_is_ppo():
    plain, _ = loss_of(Ppo(**SIZES, clip_high=0.28))
    assert loss_of(Vapo(**SIZES, positive_coef=0.0))[0] == plain
    assert loss_of(Vapo(**SIZES, positive_coef=0.1))[0] > plain


def test_vapo_without_a_correct_row():
    recipe = Vapo(**SIZES)
    given = batch().replace(correct=np.zeros(ROWS, bool))

    @jax.jit
    def found(logprobs, entropy, given):
        return policy_loss(recipe, logprobs, entropy, given, count(given), LIMIT)

    loss, metrics = found(LOGPROBS, ENTROPY, given)
    assert float(loss) == loss_of(dataclasses.replace(recipe, positive_coef=0.0))[0]
    assert float(metrics["actor/positive_loss"].value()) == 0


@functools.partial(jax.jit, static_argnums=0)
def critic_losses(recipe, values, given):
    """The loss of the critic on the batch, and on its micro-batches."""
    totals = count(given)
    parts = [
        recipe.critic_loss(values[p], jax.tree.map(lambda x, p=p: x[p], given), totals, LIMIT)
        for p in MICRO_BATCHES
    ]
    return recipe.critic_loss(values, given, totals, LIMIT), parts


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", [Ppo, Vapo])
def test_critic_loss(kind, clip):
    recipe = kind(**SIZES, value_clip=clip)
    assert isinstance(recipe, ActorCritic)
    given = batch()
    (loss, metrics), parts = critic_losses(recipe, VALUES, given)
    expected, pairs = np.zeros(MASK.shape), []
    for row, times in enumerate(oracles.rows(MASK)):
        for t in times:
            old, target = float(given.old_values[row, t]), float(given.returns[row, t])
            value = float(VALUES[row, t])
            expected[row, t], _, acts = oracles.value_token(value, old, target, clip, clip)
            pairs.append(acts)
    np.testing.assert_allclose(loss, oracles.aggregate(expected, MASK, "token-mean"), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["critic/vf_clipfrac"].value(), np.mean(pairs), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(sum(float(part) for part, _ in parts), loss, rtol=1e-5)
    explained = [part["critic/vf_explained_var"] for _, part in parts]
    np.testing.assert_allclose(
        sum(explained[1:], explained[0]).value(),
        oracles.explained_variance(VALUES, given.returns, MASK),
        rtol=1e-4,  # a difference of variances in float32
    )


# Operation by operation: of two programs one may round what the other keeps.
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "loss"), [(Gspo(), gspo_loss), (Cispo(), cispo_loss)])
def test_losses_of_their_own(recipe, loss):
    given, bounds = batch(), {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high}
    logprobs, entropy = jnp.asarray(LOGPROBS), jnp.asarray(ENTROPY)
    arrays = (logprobs, given.old_logprobs, given.advantages, given.mask)
    surrogate, _ = loss(*arrays, **bounds, aggregation=None)
    found, metrics = whole(recipe, logprobs, entropy)
    assert found == aggregate(surrogate, given.mask, recipe.aggregation)
    assert "actor/pg_clipfrac" in metrics
