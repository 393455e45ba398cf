"""The policy on the layout that decodes: the same bits, moved once per change."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from small_runs import small_model, small_run, small_setup
from tiers import full_but

from jrl.rollout import resharding
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.resharding import (
    are_disjoint,
    reshard,
    rollout_layout,
    rollout_mesh,
    rollout_policy,
    separate_rollout_mesh,
)
from jrl.rollout.sampling import GREEDY
from moe import placement
from moe import weights as moe_weights
from moe.adapters import merge_adapters, select_trained, with_base
from moe.architecture.lora import Lora
from moe.config import Model
from moe.weights import initialise_trained, table
from sharding.folding import Layout, fold


def mesh_of(text):
    layout = Layout.parse(text)
    return fold(layout, jax.devices()[: layout.num_devices])


def numbered(config, mesh):
    """Weights of which no two numbers are the same, stored on `mesh`."""
    start, leaves = 0, []
    shapes, structure = jax.tree.flatten(moe_weights.shapes(config))
    for shape in shapes:
        numbers = np.arange(start, start + shape.size, dtype=np.float32)
        leaves.append(numbers.reshape(shape.shape))
        start += shape.size
    weights = placement.in_chunks(structure.unflatten(leaves), mesh)
    return jax.device_put(weights, placement.shardings(Model(config, mesh)))


@pytest.mark.parametrize(
    ("training", "rollout"),
    [
        ("tp2 dp2 / ep4", "tp2 dp2 / ep4"),
        ("dp2 / etp2", "dp2 / etp2"),
        ("tp2 dp2 cp2 / ep8", "tp2 dp4 / ep8"),
        ("tp2 dp3 pp4 vpp2 / ep2 etp3", "tp2 dp12 / ep2 etp3"),
    ],
)
def test_pp_and_cp_become_part_of_dp(training, rollout):
    assert rollout_layout(Layout.parse(training)) == Layout.parse(rollout)


@pytest.mark.parametrize(
    ("training", "rollout"),
    full_but(
        [
            ("pp2 vpp2 dp2 tp2 / ep4", None),
            ("tp2 dp2 cp2 / ep4 etp2", None),
            ("dp4 / ep4", "tp2 dp2 / ep2 etp2"),
            ("pp4 dp2", "tp2 dp4 / ep4"),
            # Stages of two, one and one layer.
            ("pp3 dp2", None),
        ],
        ("pp2 vpp2 dp2 tp2 / ep4", None),
        ("dp4 / ep4", "tp2 dp2 / ep2 etp2"),
    ),
)
def test_weights_arrive_whole_and_where_decoding_wants_them(training, rollout):
    config = small_model(vocab_size=8, num_layers=4)
    source = mesh_of(training)
    target = rollout_mesh(rollout, source)
    moved = reshard(numbered(config, source), Model(config, source), target)
    expected = placement.shardings(Model(config, target))
    for leaf, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    chex.assert_trees_all_equal(moved, numbered(config, mesh_of("dp1")))


@pytest.mark.slow
def test_a_policy_moves_once_per_load(monkeypatch):
    moves = []

    def counted(weights, *model_and_mesh):
        moves.append(weights)
        return reshard(weights, *model_and_mesh)

    monkeypatch.setattr(resharding, "reshard", counted)
    config, mesh = small_model(vocab_size=8), mesh_of("dp2 cp2")
    decoder = Decoder(config, rollout_mesh(None, mesh), pad_id=0, stop_ids=(1,))
    engine = Engine(MeshBackend(decoder, mesh), slots=4, max_length=8, key=jax.random.key(0))
    requests = [Request(number, 0, np.full(2, 3, np.int32), 3) for number in range(5)]
    for version, weights in enumerate((numbered(config, mesh), numbered(config, mesh))):
        engine.load(weights, version)
        for _ in range(2):
            engine.submit(requests, GREEDY)
            while engine.poll():
                pass
        assert len(moves) == version + 1
        engine.release()


def test_where_training_can_decode_nothing_moves():
    setup = small_setup(run=small_run(layout="tp2 dp2 / ep4"))
    assert setup.rollout_mesh is setup.mesh
    named = small_setup(run=small_run(layout="tp2 dp2 / ep4", rollout_layout="dp2 tp2 / ep4"))
    assert named.rollout_mesh is named.mesh
    weights = numbered(setup.model, setup.mesh)
    model = Model(setup.model, setup.mesh)
    assert rollout_policy(weights, model, setup.rollout_mesh) is weights


def test_merged_policy_shares_the_weights_without_adapters():
    config = replace(small_model(vocab_size=8), lora=Lora(2, 6.0, ("attention.query",)))
    model, statement = Model(config, mesh_of("tp2")), table(config)
    base = numbered(config.without_adapters(), model.mesh)
    learned = initialise_trained(config, jax.random.key(0))
    learned = jax.tree.map(lambda leaf: leaf + 1.0, learned)
    learned = jax.device_put(learned, select_trained(placement.shardings(model), statement))
    weights = with_base(base, learned, statement)
    merged = rollout_policy(weights, model, model.mesh)
    chex.assert_trees_all_equal(merged, merge_adapters(weights, statement))
    pairs = zip(jax.tree.leaves(merged), jax.tree.leaves(base), strict=True)
    assert sum(ours is not theirs for ours, theirs in pairs) == 1


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("pp2 dp2", r"'pp2 dp2': decoding needs all layers .* for example 'tp1 cp1 dp4 pp1 / "),
        ("cp4", r"'cp4': decoding needs .* pp and cp must be 1"),
        ("dp8", r"'dp8' needs 8 devices and the layout of training has 4"),
        ("dq4", r"'dq4' is not an axis"),
    ],
)
def test_what_cannot_decode_is_refused(rollout, message):
    with pytest.raises(ValueError, match=message):
        rollout_mesh(rollout, mesh_of("tp2 dp2"))


@pytest.mark.parametrize(
    ("training", "rollout"),
    full_but(
        [("tp2 dp2 / ep4", "tp2 / ep2"), ("pp2 vpp2", "dp2"), ("pp3", "dp2")],
        ("tp2 dp2 / ep4", "tp2 / ep2"),
        ("pp2 vpp2", "dp2"),
    ),
)
def test_weights_move_to_devices_of_their_own(training, rollout):
    config, training = small_model(vocab_size=8, num_layers=4), mesh_of(training)
    beside = separate_rollout_mesh(rollout, 2, training)
    assert are_disjoint(training, beside) and not are_disjoint(
        training, rollout_mesh(None, training)
    )
    weights = numbered(config, training)
    moved = rollout_policy(weights, Model(config, training), beside)
    expected = placement.shardings(Model(config, beside))
    for leaf, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    chex.assert_trees_all_equal(moved, numbered(config, mesh_of("dp1")))


@pytest.mark.parametrize(
    ("rollout", "number", "message"),
    [
        ("pp2", 2, r"layout 'pp2' does not fit rollout_devices=2.* for example 'dp2'"),
        ("dp4", 2, r"layout 'dp4' does not fit rollout_devices=2"),
        (None, 13, r"rollout_devices=13 and the 4 of .* are 17 devices and there are 16: "),
    ],
)
def test_devices_that_are_not_there_are_refused(rollout, number, message):
    with pytest.raises(ValueError, match=message):
        separate_rollout_mesh(rollout, number, mesh_of("tp2 dp2"))


def test_devices_of_several_processes_are_refused(monkeypatch):
    training = mesh_of("dp2")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"rollout_devices=2 are devices of one process, and the"):
        separate_rollout_mesh(None, 2, training)


def test_what_cannot_decode_is_refused_where_it_trains():
    with pytest.raises(ValueError, match=r"'cp2': decoding needs"):
        rollout_mesh("cp2", mesh_of("cp2"))
