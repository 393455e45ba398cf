"""Splits as users write them, and what both sides hold."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import placement_of
from two_sides import CONFIG, MIXED, host_weights, sides, split_mesh

from moe.config import GatedDeltaNet
from moe.disaggregated.placement import Placement, layer_placements, lookup_slots
from moe.disaggregated.runner import check_micro_batches
from moe.disaggregated.split import Split, devices_of
from moe.disaggregated.weights import check_splits, move_experts, side_bytes


def test_a_split_is_two_groups_of_devices():
    split = Split.parse("tp2 dp2 / ep3 etp2")
    assert split == Split("tp2 dp2", "ep3 etp2") and split.num_devices == 10
    mesh = split_mesh("tp2 dp2 / ep3 etp2")
    attention, experts = devices_of(mesh.attention), devices_of(mesh.experts)
    assert attention + experts == jax.devices()[:10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp2 dp2", "does not name two device groups"),
        ("tp2 / ep2 / ep2", "does not name two device groups"),
        ("cp2 / ep2", "'cp2' is not one of the axes tp and dp"),
        ("tp2 / dp2", "'dp2' is not one of the axes ep and etp"),
        ("tp2 tp2 / ep2", "'tp2' is not one of the axes"),
        ("tp0 / ep2", "'tp0' is not one"),
        ("/ ep2", "attention='' names no axis"),
    ],
)
def test_split_parse_rejects_invalid_text(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Split.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "placement", "message"),
    [
        (replace(CONFIG, num_experts=0, d_ff=8), None, "num_experts=0 leaves the expert devices"),
        (replace(CONFIG, num_experts=10), None, "num_experts=10 cannot be split over ep=3"),
        (replace(CONFIG, d_expert=7), None, "d_expert=7 cannot be split over etp=2"),
        (replace(CONFIG, expert_bias=True), None, "expert_bias=True is not supported"),
        (
            replace(CONFIG, delta=GatedDeltaNet((0,), 2, 4, 5, 6, 4)),
            None,
            "delta is not supported: the attention devices do not store the states",
        ),
        (replace(CONFIG, norm_placement="both"), None, "norm_placement='both' is not supported"),
        (CONFIG, Placement.identity(12, 4), "on 4 devices does not fit ep=3"),
        (CONFIG, Placement.identity(6, 3), "6 experts does not fit num_experts=12"),
    ],
)
def test_networks_that_do_not_split_are_refused_in_one_line(config, placement, message):
    with pytest.raises(ValueError, match=message) as error:
        check_splits(config, split_mesh("tp2 / ep3 etp2"), placement)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("rows", "parts"), [(12, 2), (8, 0), (0, 1)])
def test_rows_divide_over_devices_and_micro_batches(rows, parts):
    with pytest.raises(ValueError, match=f"{rows} rows cannot be split over micro_batches={parts}"):
        check_micro_batches(rows, parts, split_mesh("tp2 dp2 / ep2"))


def test_split_weights_bytes_per_device():
    mesh = split_mesh("tp2 dp2 / ep3 etp2")
    weights, like = sides(mesh, MIXED), host_weights(MIXED)
    routed = sum(x.nbytes for x in (like.layers.experts.gate_up, like.layers.experts.down))
    over_tp = sum(
        x.nbytes
        for stack in (like.layers, like.first_layers)
        for x in jax.tree.leaves((stack.dense, replace(stack.attention, norm=None)))
    )
    # 11 tokens do not divide over tp: embedding and head are whole.
    rest = sum(x.nbytes for x in jax.tree.leaves(like)) - routed - over_tp
    held = {device: 0 for device in jax.devices()}
    for leaf in jax.tree.leaves(replace(weights, slot_tables=())):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    attention, experts = rest + over_tp // 2, routed // 6
    assert [held[d] for d in devices_of(mesh.attention)] == [attention] * 4
    assert [held[d] for d in devices_of(mesh.experts)] == [experts] * 6
    assert side_bytes(MIXED, mesh) == (attention, experts)


def test_copies_of_an_expert_share_its_tokens():
    placement = placement_of([[(0, 0), (1, 1)], [(0, 1)], [(1, 0)]], num_devices=2)
    assert placement.experts.tolist() == [0, 1, 2, 0] and not placement.is_identity
    choices = jnp.array([[0, 1], [0, 2], [3, 0], [3, 3]])
    table = jax.tree.map(jnp.asarray, placement.slot_table())
    np.testing.assert_array_equal(lookup_slots(choices, table), [[0, 1], [3, 2], [4, 0], [4, 4]])
    assert Placement.identity(6, 3).is_identity


def test_experts_move_bit_for_bit():
    """Equals placing the weights of each layer by itself."""
    mesh = split_mesh("dp1 / ep3 etp2")
    rng = np.random.default_rng(0)
    before, after = (
        tuple(
            # Twelve experts in fifteen slots, so that some have copies.
            Placement.from_slots(rng.permutation([*range(12), *rng.integers(12, size=3)]), 3)
            for _ in range(MIXED.num_expert_layers)
        )
        for _ in range(2)
    )
    given, wanted = (sides(mesh, MIXED, places) for places in (before, after))
    found = move_experts(given, mesh, before, after)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_layers_have_a_placement_each_of_as_many_slots():
    one, more = Placement.identity(4, 2), Placement.from_slots(np.array([0, 1, 2, 3, 0, 1]), 2)
    assert layer_placements(one, 3) == (one,) * 3 and more.experts.tolist() == [0, 1, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="2 placements were given for 3 layers"):
        layer_placements((one, one), 3)
    with pytest.raises(ValueError, match="differ in devices or slots"):
        layer_placements((one, more), 2)


def test_placements_that_cannot_be_are_refused_in_one_line():
    with pytest.raises(ValueError, match="expert 1 has no slot") as error:
        placement_of([[(0, 0)], [], [(1, 0)]], num_devices=2)
    assert "\n" not in str(error.value)
