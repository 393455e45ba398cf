"""Replayed choices of experts, under every dispatch and on folded meshes: values, gradients,
router sums."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from largest import assert_trees_close_by_largest
from programs import jit, mesh_of, random_weights
from small_networks import DENSE_FIRST, any_choices, ragged_rows
from whole_network import loss_and_gradient

from moe.execution import Execution
from moe.placement import in_chunks, in_layer_order

BATCH, TIME = 8, 5
UNRECORDED = (3, 2)
CASES = [
    ("all_to_all", "tp2 cp2 dp2 / ep4 etp2"),
    ("all_gather", "tp2 dp2 / ep4"),
    ("ragged", "tp2 dp2 / ep2 etp2"),
    ("all_gather", "pp2 vpp2 tp2 / ep2"),
]


def sized(layout):
    """The network, with a layer of experts for each chunk of the layout: two more on the stages of
    a pipeline that has two chunks each."""
    chunks = 4 if "vpp2" in layout else 2
    return replace(DENSE_FIRST, num_layers=DENSE_FIRST.num_dense_layers + chunks)


def batch():
    return ragged_rows(DENSE_FIRST, BATCH, TIME)


def choices(config):
    """Any experts; one token has none."""
    chosen = any_choices(config, BATCH, TIME)
    chosen[UNRECORDED] = config.num_experts
    assert batch()[1][UNRECORDED]
    return chosen


@functools.cache
def program(config, dispatch, layout):
    """From choices of experts the loss, the sums and the gradients of the batch."""
    mesh = mesh_of(layout)
    config = replace(config, execution=Execution(dispatch=dispatch))
    step = jit(loss_and_gradient(config, mesh))
    weights = in_chunks(random_weights(config, 0), mesh)

    def run(chosen):
        out, grads = jax.device_get(step(weights, (*batch(), chosen)))
        return out, in_layer_order(grads, mesh)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "layout"), CASES)
def test_equals_one_device(dispatch, layout, emulated):
    config = sized(layout)
    (value, stats), grads = program(config, dispatch, layout)(choices(config))
    on_one_device = program(config, "all_to_all", "dp1")
    (expected, expected_stats), expected_grads = on_one_device(choices(config))
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-4, of_largest=2e-6)
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    np.testing.assert_array_equal(stats.replayed, expected_stats.replayed)
    np.testing.assert_allclose(stats.agreed, expected_stats.agreed, rtol=1e-6)
    # The routers learn although their choices are not theirs.
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_the_experts_on_record_get_the_tokens():
    config = sized("dp1")
    run = program(config, "all_to_all", "dp1")
    (value, stats), grads = run(choices(config))
    valid, chosen = batch()[1], choices(config)
    valid[UNRECORDED] = False
    on_record = [
        np.bincount(layer[valid].ravel(), minlength=8) for layer in np.moveaxis(chosen, 2, 0)
    ]
    own = stats.load - np.stack(on_record)
    # The token that has no record chose three experts in each layer.
    assert own.min() == 0 and own.max() == 1
    np.testing.assert_array_equal(own.sum(axis=1), 3)
    layers = config.num_expert_layers
    assert float(stats.replayed) == valid.sum() * layers
    # Three of eight at random agree in three eighths.
    assert 0.25 < float(stats.agreed / stats.replayed) < 0.5
    # With no token on record each chooses for itself.
    (free, of_free), free_grads = run(np.full_like(chosen, config.num_experts))
    assert of_free.agreed == of_free.replayed == 0
    assert abs(value - free) > 1e-4
    router, free_router = grads.layers.experts.router, free_grads.layers.experts.router
    assert float(np.max(np.abs(router - free_router))) > 1e-4


@pytest.mark.slow
def test_without_a_record_nothing_is_said_of_one():
    weights = random_weights(DENSE_FIRST, 0)
    (_, stats), _ = jax.eval_shape(loss_and_gradient(DENSE_FIRST, mesh_of("dp1")), weights, batch())
    assert stats.agreed is None and stats.replayed is None
