"""The network on a folded mesh equals the network on one device: values, gradients, router sums."""

import itertools
import operator
import re
from collections import Counter
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from parity import CASES, CONFIGS, FULL, MOE, batch, on_one_device, run, without_execution
from programs import mesh_of, on_mesh, random_weights
from tiers import full_but

from moe import model
from moe.attention.context_parallel import CRASHING_JAX
from moe.config import Model
from moe.execution import Execution
from moe.placement import specs
from moe.router.balance import router_loss
from sharding.collectives import all_sum
from sharding.folding import Layout


def test_the_table_has_every_axis_and_every_pair():
    table = [Layout.parse(layout) for _, layout in CASES]
    assert {layout.num_devices for layout in table} >= {8, 16}
    names = ("tp", "cp", "dp", "pp", "ep", "etp")
    for pair in itertools.combinations_with_replacement(names, 2):
        assert any(all(getattr(layout, axis) > 1 for axis in pair) for layout in table), pair
    assert any(all(getattr(layout, axis) > 1 for axis in names) for layout in table)


# All axes at once, a ring in the stages of a pipeline among them.
QUICK = [("ring", "pp2 dp2 cp2 tp2 / ep4 etp2")]


@pytest.mark.parametrize(("name", "layout"), full_but([*CASES, *FULL], *QUICK))
def test_equals_one_device(name, layout):
    if name.startswith("ring") and "pp" in layout and jax.__version__.startswith(CRASHING_JAX):
        pytest.skip(f"a ring under a pipeline crashes the compiler of JAX {jax.__version__}")
    (value, stats), grads = run(CONFIGS[name], layout)
    (expected, expected_stats), expected_grads = on_one_device(without_execution(CONFIGS[name]))
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    # An element near zero is a difference of terms as large as its neighbours, with their error.
    # Where keys are short their lengths, by which they are divided, have larger ones.
    error = 2e-6 if CONFIGS[name].delta is None else 2e-5
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-4, of_largest=error)
    if stats is not None:
        if "cp" in layout:  # which pads rows to a length that it can cut
            assert stats.padded > expected_stats.padded
            stats = replace(stats, padded=expected_stats.padded, positions=expected_stats.positions)
        chex.assert_trees_all_close(stats, expected_stats, rtol=1e-5)
        np.testing.assert_array_equal(stats.load, expected_stats.load)
        assert (float(stats.dropped) > 0) == (CONFIGS[name].capacity_factor is not None)
        sent = CONFIGS[name].num_expert_layers * 3 * int(batch()[1].sum())
        assert float(stats.load.sum()) == sent
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_micro_batches_of_a_batch_add_up():
    """Router losses and sums of micro-batches, with the token count of the whole, add up to it."""
    mesh = mesh_of("tp2 dp2 / ep4")
    network = Model(MOE, mesh)
    tokens, valid = batch()
    num_tokens = np.sum(valid, dtype=np.int32)

    def local(weights, tokens, valid):
        _, stats = model.hidden(weights, tokens, valid, network)
        router = router_loss(stats, network, jnp.asarray(num_tokens))
        return all_sum(router, mesh.except_sequence), all_sum(stats, mesh.axes)

    by_row = P(mesh.dp)
    step = on_mesh(local, mesh, (specs(network), by_row, by_row), (P(), P()))
    weights = random_weights(MOE, 0)
    whole, whole_stats = jax.device_get(step(weights, tokens, valid))
    # The micro-batches are the short rows and the long ones, so that they differ in tokens.
    order = np.argsort(valid.sum(axis=1), kind="stable")
    micro_batches = [order[:4], order[4:]]
    assert len({int(valid[micro_batch].sum()) for micro_batch in micro_batches}) == 2
    parts, part_stats = zip(
        *(jax.device_get(step(weights, tokens[p], valid[p])) for p in micro_batches), strict=True
    )
    np.testing.assert_allclose(sum(map(float, parts)), whole, rtol=2e-6)
    summed = jax.tree.map(operator.add, *part_stats)
    chex.assert_trees_all_close(summed, whole_stats, rtol=1e-5)
    np.testing.assert_array_equal(part_stats[0].load + part_stats[1].load, whole_stats.load)


COLLECTIVE = r" (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("


CLAIMS = [
    # The embedding scatters what its rows gave; attention gathers and scatters once over tp; the
    # router sums its counts; tokens, ids and probs go to the experts and sums come back.
    (
        "routed",
        "all_to_all",
        "tp2 dp4 / ep8",
        {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 2, "all-to-all": 4},
    ),
    # Over etp tokens, ids and probs are gathered and sums scattered.
    (
        "routed",
        "all_to_all",
        "tp2 dp4 / ep4 etp2",
        {"all-gather": 4, "all-reduce": 1, "reduce-scatter": 3, "all-to-all": 4},
    ),
    # Over cp attention gathers keys and values; the counts of a sequence come from both axes.
    (
        "routed",
        "all_to_all",
        "tp2 cp2 dp2 / ep4",
        {"all-gather": 3, "all-reduce": 1, "reduce-scatter": 2, "all-to-all": 4},
    ),
    # Tokens, ids and weights are gathered, sums scattered.
    (
        "routed",
        "all_gather",
        "tp2 dp4 / ep8",
        {"all-gather": 4, "all-reduce": 1, "reduce-scatter": 3},
    ),
    # The shared expert gathers and scatters as attention does.
    (
        "shared",
        "all_to_all",
        "tp2 dp4 / ep8",
        {"all-gather": 2, "all-reduce": 1, "reduce-scatter": 3, "all-to-all": 4},
    ),
    # Of 11 tokens each rank has the whole embedding.
    ("dense", None, "tp2 dp4", {"all-gather": 2, "reduce-scatter": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dispatch", "layout", "expected"), full_but(CLAIMS, CLAIMS[5]))
def test_collectives_of_one_layer_are_those_claimed(name, dispatch, layout, expected):
    config = replace(CONFIGS[name], num_layers=1, execution=Execution(dispatch=dispatch))
    mesh = mesh_of(layout)
    network = Model(config, mesh)
    by_row = P(mesh.dp)

    def local(weights, tokens, valid):
        x, stats = model.hidden(weights, tokens, valid, network)
        # What a device counts is a scalar; laid end to end it needs a dimension.
        return x, jax.tree.map(jnp.atleast_1d, stats)

    step = on_mesh(local, mesh, (specs(network), by_row, by_row), P(mesh.axes))
    text = step.lower(random_weights(config, 0), *batch()).compile().as_text()
    assert Counter(re.findall(COLLECTIVE, text)) == expected
