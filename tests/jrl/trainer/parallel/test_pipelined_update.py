"""The update through a pipeline equals the update on one device: loss, gradients, metrics."""

import functools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from permutes import check_permutes
from small_runs import (
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    fresh_state,
    fresh_weights,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from three_updates import (
    FAST_COMPILE,
    assert_same_updates,
    random_weights,
    three_updates,
)

from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.learner.update import update
from jrl.trainer.scoring import PromptLayout, logprobs_of, num_micro_batches, values_of
from jrl.trainer.state import abstract, restore, save
from moe import placement
from moe.config import Model
from moe.execution import Execution
from sharding.folding import Layout, fold_abstract

ROWS = 8


@functools.cache
def setup_on(layout, num_layers=4, context=None):
    """Four layers and a tied embedding, which the first and the last stage both use."""
    setup = small_setup(small_recipe("vapo"), small_run(layout=layout, context=context))
    # What is compiled reads the network's own execution, not the run's.
    sizes = {"num_layers": num_layers, "execution": Execution(context=context)}
    model = small_model(setup.tokenizer.vocab_size, head="tied", **sizes)
    return replace(setup, model=model)


@functools.cache
def updates_on(layout, num_micro, num_layers=4, context=None):
    return three_updates(setup_on(layout, num_layers, context), ROWS, num_micro)


# `tests/moe/test_mesh_parity.py` has the loss and gradients of a pipeline in the quick tier.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_micro"),
    [("pp2 dp4 / ep4", 2), ("pp2 vpp2 tp2 / ep2", 4)],
)
def test_updates_equal_those_of_one_device(layout, num_micro):
    assert_same_updates(updates_on(layout, num_micro), updates_on("dp1", 1))


@pytest.mark.slow
def test_updates_of_uneven_stages_equal_those_of_one_device():
    assert_same_updates(updates_on("pp2 vpp2 tp2 / ep2", 2, 5), updates_on("dp1", 1, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_layers"), [("cp2 pp2", 4), ("tp2 cp2 pp2 vpp3 / ep4", 6)])
def test_updates_of_a_ring_in_stages_equal_those_of_one_device(layout, num_layers):
    assert_same_updates(updates_on(layout, 2, num_layers, "ring"), updates_on("dp1", 1, num_layers))


@pytest.mark.slow
def test_a_stage_sends_one_message_each_way():
    setup = setup_on("pp2 vpp2 tp2 / ep2")
    objective, optimizer = setup.networks.policy.objective, setup.networks.policy.optimizer
    learner = setup.networks.policy.init(random_weights(setup, setup.model))
    lowered = update.lower(objective, optimizer, 4, learner, small_batch(setup, ROWS))
    assert lowered.as_text().count('"stablehlo.collective_permute"') == 2


@functools.cache
def scores_on(layout, context=None):
    setup = setup_on(layout, context=context)
    batch = small_batch(setup, ROWS)

    def scored(function, objective, config):
        given = random_weights(setup, config), batch.tokens, batch.valid
        traced = function.dropless.trace(objective.for_any_routing(), *given)
        check_permutes(traced.jaxpr.jaxpr)
        return traced.lower().compile(FAST_COMPILE)(*given)

    critic = setup.networks.critic.objective
    found = [
        scored(logprobs_of, setup.networks.policy.objective, setup.model),
        scored(values_of, critic, critic.config),
    ]
    # What padding attends to is not defined, and is something else in a ring.
    valid = np.asarray(batch.valid)
    return jax.tree.map(lambda x: np.asarray(x)[valid], found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "context"), [("pp2 vpp2 dp2 tp2 / ep4", None), ("cp2 pp2", "ring")]
)
def test_scores_and_values_come_through_the_pipeline(layout, context):
    chex.assert_trees_all_close(scores_on(layout, context), scores_on("dp1"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "num_rows", "copies", "number"),
    [
        ("pp2", 64, 2, 8),
        ("pp2", 8, 2, 4),
        ("pp4", 48, 2, 12),
        ("pp2", 10, 5, 2),
        # A prompt of 6 tokens and two responses of 5 divide by 2; three responses do not.
        ("pp2 tp2", 8, 2, 4),
        ("pp2 tp2", 12, 3, 2),
    ],
)
def test_scoring_is_cut_into_whole_groups(layout, num_rows, copies, number):
    mesh = fold_abstract(Layout.parse(layout))
    time = PROMPT_LENGTH + RESPONSE_LENGTH
    assert num_micro_batches(num_rows, time, PromptLayout(PROMPT_LENGTH, copies), mesh) == number


STORED = [
    ("pp2 dp2", 3, (4,), (2,)),
    ("pp2 vpp2", 5, (2, 4), (2, 2)),
    # Moments in shards over tp too: JAX 0.11 ended the process at a gather of such layers.
    ("pp2 tp2", 3, (4,), (2,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_layers", "shape", "on_a_stage"), STORED)
def test_a_checkpoint_of_a_pipeline_is_one_of_any_layout(
    tmp_path, layout, num_layers, shape, on_a_stage
):
    def without_critic(layout):
        setup = setup_on(layout)
        model = replace(setup.model, num_layers=num_layers)
        return replace(setup, recipe=small_recipe("grpo"), model=model)

    piped, plain = without_critic(layout), without_critic("dp1")
    weights = fresh_weights(piped)
    query = weights.layers.attention.query
    assert query.shape[: len(shape)] == shape
    assert query.sharding.shard_shape(query.shape)[: len(shape)] == on_a_stage
    state = fresh_state(piped, weights)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, piped.networks, state)
    elsewhere = restore(checkpoints, plain.networks, 0)
    back = restore(checkpoints, piped.networks, 0)
    like = abstract(piped.networks)
    same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), back, like)
    assert all(jax.tree.leaves(same))
    chex.assert_trees_all_equal(back, state)
    in_order = placement.in_layer_order(jax.device_get(weights), piped.mesh, num_layers)
    assert in_order.layers.norm.shape[0] == num_layers
    chex.assert_trees_all_equal(elsewhere.policy.weights, in_order)


def test_every_chunk_has_a_layer():
    setup = setup_on("dp1")
    with pytest.raises(
        ValueError, match=r"num_layers=4 cannot be split into 5 pipeline stages x 1"
    ):
        placement.specs(Model(setup.model, fold_abstract(Layout(pp=5))))
    with pytest.raises(ValueError, match=r"num_layers=4 .* 2 pipeline stages x 3 chunks"):
        placement.specs(Model(setup.model, fold_abstract(Layout(pp=2, vpp=3))))
