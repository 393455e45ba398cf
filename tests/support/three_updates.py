"""Three updates of the same network on the same batch, so that layouts can be compared."""

from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from largest import assert_trees_close_by_largest
from permutes import check_permutes
from small_runs import small_batch

from jrl.trainer.learner.metrics import PerUpdate
from jrl.trainer.learner.update import update
from moe import placement
from moe import weights as moe_weights
from moe.config import Model

# Without the code generator's optimisations a compilation takes half the time.
FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


def random_weights(setup, config):
    """The same on every layout, laid out; none of them 0 or 1."""
    draw = np.random.default_rng(3)
    weights = jax.tree.map(
        lambda shape: draw.normal(size=shape.shape).astype(np.float32) * 0.3,
        moe_weights.shapes(config),
    )
    weights = placement.in_chunks(weights, setup.mesh)
    return jax.device_put(weights, placement.shardings(Model(config, setup.mesh)))


def gradient_of(learner, mesh, num_layers=None):
    """A tenth of the clipped gradient: the first moment after one step, its layers in order."""
    leaves = jax.tree.leaves(learner.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    (moments,) = (leaf.mu for leaf in leaves if hasattr(leaf, "mu"))
    return placement.in_layer_order(jax.device_get(moments), mesh, num_layers)


def numbers_of(outcome) -> dict[str, Any]:
    """Loss, gradient norm and metrics of an update."""
    both = {"loss": PerUpdate(outcome.loss), "grad_norm": PerUpdate(outcome.grad_norm)}
    return {**both, **outcome.metrics}


class Updates(NamedTuple):
    """The first gradient, the outcome of each step, and the learner after the last."""

    gradient: Any
    history: list[Any]
    learner: Any


def compiled_update(*given) -> Any:
    """`update` for these arguments, of which no device leaves a permute out."""
    traced = update.trace(*given)
    check_permutes(traced.jaxpr.jaxpr)
    return traced.lower().compile(FAST_COMPILE)


def three_updates(setup, rows, num_micro) -> Updates:
    objective, optimizer = setup.networks.policy.objective, setup.networks.policy.optimizer
    learner = setup.networks.policy.init(random_weights(setup, setup.model))
    batch = small_batch(setup, rows)
    step = compiled_update(objective, optimizer, num_micro, learner, batch)
    history, gradient = [], None
    for _ in range(3):
        learner, metrics = step(learner, batch)
        history.append(jax.device_get(metrics))
        if gradient is None:
            model = setup.model
            stacked = model.num_layers - model.num_dense_layers
            gradient = gradient_of(learner, setup.mesh, stacked)
    return Updates(gradient, history, learner)


def assert_same_updates(found, expected):
    """Equal but for rounding: loss, gradient and metrics."""
    gradient, history = found.gradient, found.history
    # float32 sums of a few hundred terms in another order; an element near zero is a difference of
    # terms as large as its neighbours, with their error.
    assert_trees_close_by_largest(gradient, expected.gradient, rtol=2e-4, of_largest=4e-6)
    assert all(float(np.max(np.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradient))
    for step, (metrics, same) in enumerate(zip(history, expected.history, strict=True)):
        metrics, same = numbers_of(metrics), numbers_of(same)
        # Places of the stream: a prompt is run once for the rows of one device that share it.
        metrics, same = (
            {name: metric for name, metric in both.items() if name != "moe/padded_fraction"}
            for both in (metrics, same)
        )
        # Adam divides a gradient by its size, and with it what rounding made of one near zero.
        close = {"rtol": 2e-5, "atol": 2e-6} if step == 0 else {"rtol": 1e-3, "atol": 1e-4}
        chex.assert_trees_all_close(metrics, same, **close)
    np.testing.assert_array_equal(history[0].load.counts, expected.history[0].load.counts)
