"""An update of adapters equals the chain rule through merged weights, on any layout."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from largest import assert_trees_close_by_largest
from small_runs import small_batch, small_model, small_recipe, small_run, small_setup
from three_updates import compiled_update, gradient_of, numbers_of, random_weights
from tiers import full_but

from jrl.rollout.resharding import rollout_mesh, rollout_policy
from moe import placement, weights
from moe.adapters import combine_trees, merge_adapters, select_frozen, select_trained
from moe.architecture.lora import TARGETS, Lora
from moe.config import Model
from moe.execution import Execution

ROWS = 8
PARTS = Execution(scan_layers=True, fsdp=True, remat="full")
LAYOUTS = (
    ("dp2 tp2 / ep4", {"execution": PARTS}),
    ("pp2 vpp2", {}),
)


def model(vocab_size, **changes):
    """A dense layer and four with experts and a shared one, every product with an adapter."""
    lora = Lora(rank=3, alpha=4.5, targets=TARGETS, rank_stabilised=True)
    sizes = {"num_layers": 5, "num_dense_layers": 1, "dense_d_ff": 14, "d_ff": 6, "d_model": 16}
    # One program for the layers: it compiles in a third of the time.
    execution = Execution(scan_layers=True)
    return small_model(vocab_size, **{**sizes, "lora": lora, "execution": execution, **changes})


def setup_on(layout, **changes):
    # Nothing is clipped: gradients are as large as they are.
    recipe = small_recipe(max_grad_norm=1e6)
    setup = small_setup(recipe, small_run(layout=layout))
    return replace(setup, model=model(setup.tokenizer.vocab_size, **changes))


def one_update(setup, given, num_micro=1):
    """The gradient, as the first moment has it, and the metrics."""
    network = setup.networks.policy
    learner, statement = network.init(given), weights.table(setup.model)
    fixed = select_frozen(learner.weights, statement)
    learner = replace(learner, weights=select_trained(learner.weights, statement))
    arguments = learner, small_batch(setup, ROWS), None, None
    how = network.objective, network.optimizer, num_micro
    if setup.model.lora is None:
        fixed = None
    step = compiled_update(*how, *arguments, fixed)
    learner, metrics = step(*arguments, fixed)
    stacked = setup.model.num_layers - setup.model.num_dense_layers
    return gradient_of(learner, setup.mesh, stacked), jax.device_get(metrics)


@functools.cache
def on_one_device():
    setup = setup_on("dp1")
    return one_update(setup, random_weights(setup, setup.model), num_micro=2)


def assert_close(found, expected):
    # float32 sums of a few hundred terms in another order; an element near zero is a difference of
    # terms as large as its neighbours, with their error.
    assert_trees_close_by_largest(found, expected, rtol=5e-4, of_largest=1e-5)
    assert all(np.any(b) for b in jax.tree.leaves(expected))


@pytest.mark.slow
def test_gradients_are_those_of_merged_weights_by_the_chain_rule():
    setup = setup_on("dp1")
    plain = replace(setup, model=setup.model.without_adapters())
    given, statement = random_weights(setup, setup.model), weights.table(setup.model)

    def merge(learned):
        both = combine_trees(learned, select_frozen(given, statement))
        return merge_adapters(both, statement)

    twin, back = jax.vjp(merge, select_trained(given, statement))
    by_weights, expected = one_update(plain, twin)
    found, metrics = on_one_device()
    assert_close(found, back(by_weights)[0])
    # Sums of as many products, rounded apart.
    metrics, expected = numbers_of(metrics), numbers_of(expected)
    for name in ("loss", "actor/pg_loss"):
        pair = metrics[name].value(), expected[name].value()
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_updates_equal_those_of_one_device(layout, changes):
    setup = setup_on(layout, **changes)
    num_micro = 2 if "pp" in layout else 1
    found, metrics = one_update(setup, random_weights(setup, setup.model), num_micro)
    expected, same = on_one_device()
    assert_close(found, expected)
    np.testing.assert_allclose(metrics.loss, same.loss, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "pp2 vpp2"], "dp1"))
def test_what_samples_is_merged_in_float32_and_rounded_once(layout):
    setup = setup_on(layout, dtype="bfloat16")
    config, mesh = setup.model, setup.mesh
    given = weights.cast(random_weights(setup, config), config)
    found = rollout_policy(given, Model(config, mesh), rollout_mesh(None, mesh))
    in_order = jax.device_get(placement.in_layer_order(given, mesh))
    query = in_order.layers.attention.query
    added = np.einsum("ldr,lrhk->ldhk", query.a, query.b, dtype=np.float64) * query.scale
    exact = query.base.astype(np.float64) + added
    merged = np.asarray(found.layers.attention.query)
    assert merged.dtype == query.base.dtype
    # Half of the last of bfloat16's eight digits; of products that cancel, float32's.
    np.testing.assert_allclose(merged.astype(np.float64), exact, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(found.embedding), in_order.embedding)
