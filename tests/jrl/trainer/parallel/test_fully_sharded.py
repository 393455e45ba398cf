"""Weights kept in parts: the same updates, less on each device, and where they are joined."""

import functools
from dataclasses import replace

import chex
import jax
import pytest
from small_runs import (
    fresh_state,
    sampled,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from three_updates import assert_same_updates, random_weights, three_updates

from jrl.rollout.resharding import reshard
from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.learner.update import update
from jrl.trainer.setup.memory import memory
from jrl.trainer.state import abstract, restore, save
from moe import placement
from moe.config import Model
from moe.execution import Execution
from sharding.folding import Layout, fold

ROWS = 8
PIPELINED = {"num_layers": 4, "num_dense_layers": 0, "dense_d_ff": 0}
LAYOUTS = [
    ("dp4", "selective", 2),
    ("tp2 dp2 cp2 / ep4", "full", 1),
    ("pp2 vpp2 dp2", "full", 2),
]


@functools.cache
def setup_on(layout, remat="full", fsdp=True, recipe="grpo"):
    """A tied embedding; where a device has all layers, the first of the two is dense."""
    setup = small_setup(small_recipe(recipe), small_run(layout=layout))
    execution = Execution(remat=remat, fsdp=fsdp)
    dense_first = {"num_layers": 2, "num_dense_layers": 1, "dense_d_ff": 24}
    sizes = PIPELINED if "pp" in layout else dense_first
    vocab = setup.tokenizer.vocab_size
    return replace(setup, model=small_model(vocab, **sizes, head="tied", execution=execution))


@functools.cache
def on_one_device(pipelined):
    setup = setup_on("dp1", "none", False)
    if pipelined:
        setup = replace(setup, model=replace(setup.model, **PIPELINED))
    return three_updates(setup, ROWS, 1)


@functools.cache
def updates_on(layout, remat, num_micro):
    return three_updates(setup_on(layout, remat), ROWS, num_micro)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "remat", "num_micro"), LAYOUTS)
def test_updates_equal_those_of_one_device(layout, remat, num_micro):
    found = updates_on(layout, remat, num_micro)
    assert_same_updates(found, on_one_device("pp" in layout))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "remat", "num_micro"), LAYOUTS[2:])
def test_updates_of_scanned_layers_equal_those_of_one_device(layout, remat, num_micro):
    setup = setup_on(layout, remat)
    execution = replace(setup.model.execution, scan_layers=True)
    setup = replace(setup, model=replace(setup.model, execution=execution))
    assert_same_updates(three_updates(setup, ROWS, num_micro), on_one_device("pp" in layout))


def elements_on_one(tree):
    return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_device_keeps_its_part_before_and_after_an_update():
    setup = setup_on("dp4", "selective")
    before = setup.networks.policy.init(random_weights(setup, setup.model))
    whole = sum(leaf.size for leaf in jax.tree.leaves(before.weights))
    # All but a weight or two divides by four.
    assert whole / 4 <= elements_on_one(before.weights) < 1.05 * whole / 4
    after = updates_on(*LAYOUTS[0]).learner
    same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), after, before)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "programs"), [(False, 2), (True, 1)])
def test_each_layer_is_joined_forward_and_again_backward(scanned, programs):
    """Two layers, of a program each or of one for both."""
    setup = setup_on("dp4")
    execution = replace(setup.model.execution, scan_layers=scanned)
    setup = replace(setup, model=replace(setup.model, num_layers=3, execution=execution))
    objective, optimizer = setup.networks.policy.objective, setup.networks.policy.optimizer
    learner = setup.networks.policy.init(random_weights(setup, setup.model))
    lowered = update.lower(objective, optimizer, 1, learner, small_batch(setup, ROWS)).as_text()
    cuts = placement.shard_dims(Model(setup.model, setup.mesh))
    of_a_layer, of_all = (
        sum(bool(cut.atoms) for cut in jax.tree.leaves(some)) for some in (cuts.layers, cuts)
    )
    ends = of_all - of_a_layer
    assert of_a_layer >= 8 and ends >= 2
    gathers = lowered.count('"stablehlo.all_gather"')
    scatters = lowered.count('"stablehlo.reduce_scatter"')
    assert gathers == ends + 2 * programs * of_a_layer
    assert scatters == ends + programs * of_a_layer


@pytest.mark.slow
def test_the_rollout_has_whole_weights_and_draws_the_same():
    setup, plain = setup_on("dp4"), setup_on("dp4", fsdp=False)
    weights, same = (random_weights(s, s.model) for s in (setup, plain))
    drawn = [sampled(s, own) for s, own in ((setup, weights), (plain, same))]
    chex.assert_trees_all_equal(*drawn)
    apart = fold(Layout(tp=2, dp=2), jax.devices()[:4])
    moved, unsharded = (
        reshard(own, Model(s.model, s.mesh), apart) for s, own in ((setup, weights), (plain, same))
    )
    assert elements_on_one(moved) == elements_on_one(unsharded)
    chex.assert_trees_all_equal(moved, same)


@pytest.mark.slow
def test_a_checkpoint_is_read_with_and_without(tmp_path):
    setup, plain = setup_on("dp4"), setup_on("dp2", fsdp=False)
    state = fresh_state(setup, random_weights(setup, setup.model))
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, setup.networks, state)
    for reader in (setup, plain):
        back, like = restore(checkpoints, reader.networks, 0), abstract(reader.networks)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, back, like)
        assert all(jax.tree.leaves(same))
        chex.assert_trees_all_equal(back, state)


@pytest.mark.slow
def test_the_memory_of_a_dry_run():
    sharded, plain = (memory(setup_on("dp4", fsdp=fsdp, recipe="vapo")) for fsdp in (True, False))
    assert plain["weights"] / 4 <= sharded["weights"] < 1.05 * plain["weights"] / 4
    assert sharded["gradients"] < plain["gradients"]
    assert sharded["weights gathered for scoring"] == max(plain["weights"], plain["critic"])
    assert sum(sharded.values()) < sum(plain.values())


def test_what_would_keep_the_layers_is_refused():
    with pytest.raises(ValueError, match='fsdp with remat="none" keeps every all-gathered layer'):
        Execution(fsdp=True)
