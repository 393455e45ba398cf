"""The one jitted update: however a mini-batch is cut, and when a number is not finite."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import fresh_weights, small_batch, small_recipe, small_run, small_setup
from three_updates import numbers_of
from tiers import full_but

from jrl.losses import ExplainedVariance, Mean
from jrl.recipes.base.batch import replicated
from jrl.recipes.base.optimizer import Optimizer, transformation
from jrl.trainer.learner.learner import init_learner
from jrl.trainer.learner.metrics import FirstUpdate, Max
from jrl.trainer.learner.update import update
from jrl.trainer.state import init_weights
from moe.config import Model


def networks(setup):
    """Inputs of each update: objective, optimizer, weights with a head that is not 0."""
    policy, critic = setup.networks.policy, setup.networks.critic
    random = init_weights(Model(critic.config, setup.mesh), setup.randomness.key("critic"))
    head = jax.device_put(jnp.linspace(-1.0, 1.0, setup.model.d_model), replicated(setup.mesh))
    return {
        "policy": (policy.objective, policy.optimizer, fresh_weights(setup)),
        "critic": (critic.objective, critic.optimizer, random.replace(head=head)),
    }


def setup_on(layout):
    return small_setup(small_recipe("vapo"), small_run(layout=layout))


# In two micro-batches, by one program for all tests of an update that ask for no other.
def one_update(network, layout, num_micro, batch=small_batch):
    setup = setup_on(layout)
    objective, optimizer, weights = networks(setup)[network]
    learner = init_learner(optimizer, weights, Model(objective.config, setup.mesh))
    return jax.device_get(update(objective, optimizer, num_micro, learner, batch(setup)))


def moments(learner):
    """The first moment after one step: a tenth of the clipped gradient."""
    return next(
        part.mu
        for part in jax.tree.leaves(learner.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(part, "mu")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "layout", "num_micro"),
    full_but(
        [
            ("policy", "dp1", 2),
            ("policy", "tp2 dp2 / ep2 etp2", 1),
            ("critic", "tp2 dp2 / ep4", 1),
            ("policy", "cp2 dp2", 1),
        ],
        ("policy", "dp1", 2),
    ),
)
def test_cutting_changes_nothing(network, layout, num_micro):
    """Micro-batches and devices hold unlike numbers of tokens, and one row counts nowhere."""
    learner, metrics = one_update(network, layout, num_micro)
    expected, expected_metrics = one_update(network, "dp1", 1)
    metrics, expected_metrics = numbers_of(metrics), numbers_of(expected_metrics)
    gradient, expected_gradient = moments(learner), moments(expected)
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit of the
    # largest entries, which are near 1e-2.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-8),
        gradient,
        expected_gradient,
    )
    # The first step of Adam is the sign of the gradient unless that is next to nothing.
    jax.tree.map(
        lambda a, b, g: np.testing.assert_allclose(
            a[np.abs(g) > 1e-6], b[np.abs(g) > 1e-6], rtol=1e-4, atol=1e-6
        ),
        learner.weights,
        expected.weights,
        expected_gradient,
    )
    assert metrics.keys() == expected_metrics.keys()
    if "cp" in layout:  # which pads rows to a length that it can cut
        padded = metrics.pop("moe/padded_fraction"), expected_metrics.pop("moe/padded_fraction")
        assert padded[0].value() > padded[1].value()
    for name, expected_metric in expected_metrics.items():
        if isinstance(expected_metric, Mean | ExplainedVariance):
            assert metrics[name].count == expected_metric.count
        one, other = (m.value() for m in (metrics[name], expected_metric))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_metrics_are_means_over_the_tokens_that_count():
    _, outcome = one_update("policy", "dp1", 2)
    metrics = outcome.metrics
    batch = jax.device_get(small_batch(setup_on("dp1")))
    for name, metric in metrics.items():
        metric = metric.metric if isinstance(metric, FirstUpdate) else metric
        if isinstance(metric, Mean) and name.startswith(("actor/", "sampling/")):
            correct = batch.mask & batch.correct[:, None]
            counted = correct if name == "actor/positive_loss" else batch.mask
            assert metric.count == counted.sum(), name
    assert metrics["moe/z_loss"].count == batch.valid.sum()
    assert outcome.load.counts.sum() == batch.valid.sum() * 2  # each token goes to two experts
    difference = metrics["sampling/sampling_logp_difference/max"]
    assert isinstance(difference.metric, Max)
    assert difference.value() > metrics["sampling/sampling_logp_difference/mean"].value() > 0


# `tests/moe/router/test_balance.py` has what the load moves.
@pytest.mark.slow
@pytest.mark.parametrize("network", ["policy", "critic"])
def test_selection_bias_is_moved_by_the_load_alone(network):
    """On two devices, against a large weight decay."""
    recipe = small_recipe("vapo", weight_decay=0.5)
    setup = small_setup(recipe, small_run(layout="dp2 / etp2"))
    setup = replace(setup, model=replace(setup.model, selection_bias=True, router_scores="sigmoid"))
    objective, optimizer, weights = networks(setup)[network]
    experts = weights.layers.experts
    bias = jnp.linspace(-0.1, 0.1, experts.bias.size).reshape(experts.bias.shape)
    bias = jax.device_put(bias, replicated(setup.mesh))
    layers = replace(weights.layers, experts=replace(experts, bias=bias))
    learner = init_learner(
        optimizer, replace(weights, layers=layers), Model(objective.config, setup.mesh)
    )
    learner, metrics = jax.device_get(update(objective, optimizer, 1, learner, small_batch(setup)))
    load = metrics.load.counts
    assert load.sum() == jax.device_get(small_batch(setup)).valid.sum() * 2 * setup.model.num_layers
    expected = np.asarray(bias) + 1e-3 * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_allclose(learner.weights.layers.experts.bias, expected, rtol=1e-6)
    assert len(np.unique(np.sign(load.mean(axis=1, keepdims=True) - load))) > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_moves_nothing(bad):
    def spoilt(setup):
        batch = small_batch(setup)
        row, column = np.argwhere(np.asarray(batch.mask))[-1]
        return batch.replace(advantages=batch.advantages.at[row, column].set(bad))

    setup = setup_on("dp1")
    objective, optimizer, weights = networks(setup)["policy"]
    learner, _ = update(
        objective,
        optimizer,
        2,
        init_learner(optimizer, weights, Model(objective.config, setup.mesh)),
        small_batch(setup),
    )
    before = jax.device_get(learner)
    for times in (1, 2):
        learner, metrics = update(objective, optimizer, 2, learner, spoilt(setup))
        assert not metrics.finite
        assert not np.isfinite(metrics.loss) or not np.isfinite(metrics.grad_norm)
        after = jax.device_get(learner)
        assert (after.updates, after.skipped, after.skipped_in_a_row) == (1, times, times)
        kept = jax.tree.map(
            lambda a, b: a.tobytes() == b.tobytes(),
            (after.weights, after.opt_state),
            (before.weights, before.opt_state),
        )
        assert all(jax.tree.leaves(kept))
    learner, metrics = update(objective, optimizer, 2, learner, small_batch(setup))
    assert metrics.finite
    counters = learner.updates, learner.skipped, learner.skipped_in_a_row
    assert tuple(int(counter) for counter in counters) == (2, 2, 0)


@pytest.mark.parametrize("network", full_but(["policy", "critic"], "policy"))
def test_a_mini_batch_without_tokens_moves_nothing(network):
    """Though there are momentum, a warm-up and the routers' losses."""
    setup = setup_on("dp1")
    objective, optimizer, weights = networks(setup)[network]
    learner = init_learner(optimizer, weights, Model(objective.config, setup.mesh))
    learner, metrics = update(objective, optimizer, 2, learner, small_batch(setup))
    assert not metrics.empty
    before = jax.device_get(learner)

    batch = small_batch(setup)
    nothing = batch.replace(mask=jnp.zeros_like(batch.mask))
    after, metrics = jax.device_get(update(objective, optimizer, 2, learner, nothing))
    assert metrics.empty and metrics.finite and metrics.grad_norm > 0
    kept = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), after, before)
    assert all(jax.tree.leaves(kept))
    assert (after.updates, after.skipped, after.skipped_in_a_row) == (1, 0, 0)


def test_what_lies_under_the_mask_is_never_read():
    def filled(setup):
        batch = small_batch(setup)
        return batch.replace(advantages=jnp.where(batch.mask, batch.advantages, jnp.nan))

    learner, metrics = one_update("policy", "dp1", 2, filled)
    expected, expected_metrics = one_update("policy", "dp1", 2)
    assert metrics.finite
    for one, other in ((learner, expected), (metrics, expected_metrics)):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_callers_weights_survive():
    """`start` copies what it is given, and `update` reuses the buffers of what it is given."""
    setup = setup_on("dp1")
    objective, optimizer, weights = networks(setup)["policy"]
    before = jax.device_get(weights)
    learner = init_learner(optimizer, weights, Model(objective.config, setup.mesh))
    given_up = learner.weights.embedding
    moved, _ = update(objective, optimizer, 2, learner, small_batch(setup))
    assert given_up.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(weights), before)
    assert not np.array_equal(moved.weights.embedding, before.embedding)


def test_gradients_are_scaled_down_to_the_bound():
    learner, metrics = one_update("policy", "dp1", 2)
    bound = setup_on("dp1").recipe.max_grad_norm
    assert metrics.grad_norm > bound
    # The moment holds a tenth of the gradient; float32.
    squares = [np.sum(np.square(moment)) for moment in jax.tree.leaves(moments(learner))]
    np.testing.assert_allclose(np.sqrt(sum(squares)), 0.1 * bound, rtol=1e-4)


def test_warm_up():
    """The n-th step of the warm-up runs at n / warmup of the rate, and Adam's first step is
    that."""
    optimizer = Optimizer(0.6, warmup=3)
    np.testing.assert_allclose([optimizer.rate_at(n) for n in range(5)], [0.2, 0.4, 0.6, 0.6, 0.6])
    np.testing.assert_allclose([Optimizer(0.6).rate_at(n) for n in range(2)], [0.6, 0.6])
    setup = setup_on("dp1")
    weights = jax.device_get(networks(setup)["policy"][2])
    learner, _ = one_update("policy", "dp1", 2)
    moved = np.abs(learner.weights.layers.attention.query - weights.layers.attention.query)
    # Where the gradient is far above Adam's 1e-8.
    np.testing.assert_allclose(moved.max(), setup.recipe.learning_rate / 3, rtol=1e-2)


@pytest.mark.slow
def test_a_first_moment_in_bfloat16_is_rounded_and_the_second_is_not():
    """Ten steps of a constant gradient of 0.3, which the bound leaves as it is."""
    weights, gradient = jnp.zeros(5), jnp.full(5, 0.3)
    optimizers = [transformation(Optimizer(0.1, mu_dtype=d), None) for d in ("float32", "bfloat16")]
    states = [one.init(weights) for one in optimizers]
    for _ in range(10):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found = [
                one.update(gradient, state, weights)
                for one, state in zip(optimizers, states, strict=True)
            ]
        (plain, small), states = zip(*found, strict=True)
    (exact, rounded) = (state[1][0] for state in states)
    assert (exact.mu.dtype, rounded.mu.dtype) == (jnp.float32, jnp.bfloat16)
    assert exact.nu.dtype == rounded.nu.dtype == jnp.float32
    np.testing.assert_array_equal(exact.nu, rounded.nu)
    # Two roundings of 2^-9 a step, of which nine tenths go on to the next.
    np.testing.assert_allclose(rounded.mu.astype(jnp.float32), exact.mu, rtol=0.02)
    np.testing.assert_allclose(small, plain, rtol=0.02)
    assert not np.array_equal(small, plain)
