"""Placement of each weight on a mesh."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe.config import GatedDeltaNet, Model, ModelConfig
from moe.execution import Execution
from moe.placement import shard_specs, shardings, specs
from moe.weights import shapes
from sharding.folding import Layout, fold, fold_abstract

# A distinct size for each axis; products are distinct enough to tell two weights apart.
ROUTED = ModelConfig(
    vocab_size=17,
    num_layers=3,
    d_model=20,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=5,
    d_expert=14,
)

CONFIGS = {
    "routed": ROUTED,
    "shared": replace(ROUTED, d_ff=12, head="tied"),
    "dense": replace(ROUTED, num_experts=0, d_ff=28),
    "critic": replace(ROUTED, head="value"),
}


def test_specs_follow_the_rules():
    mesh = fold_abstract(Layout.parse("tp2 dp4 / ep4"))
    placed = specs(Model(CONFIGS["shared"], mesh))
    assert placed.embedding == P(None, None)  # 17 tokens
    assert placed.layers.attention.query == P(mesh.pp, None, mesh.tp, None)
    assert placed.layers.attention.key == P(mesh.pp, None, mesh.tp, None)
    assert placed.layers.attention.out == P(mesh.pp, mesh.tp, None, None)
    assert placed.layers.experts is not None
    assert placed.layers.experts.router == P(mesh.pp, None, None)
    assert placed.layers.experts.down == P(mesh.pp, mesh.ep, mesh.etp, None)
    assert placed.layers.dense is not None
    assert placed.layers.dense.down == P(mesh.pp, mesh.tp, None)
    assert placed.head is None
    assert specs(Model(CONFIGS["critic"], mesh)).head == P(None)


def test_the_vocabulary_is_spread_where_it_divides():
    odd, even = ROUTED, replace(ROUTED, vocab_size=18)
    for layout in ("tp2 dp4 / ep4", "tp2 pp3 / ep2"):
        mesh = fold_abstract(Layout.parse(layout))
        assert specs(Model(odd, mesh)).embedding == specs(Model(odd, mesh)).head == P(None, None)
        assert specs(Model(even, mesh)).embedding == P(mesh.tp, None)
        assert specs(Model(even, mesh)).head == P(None, mesh.tp)
        assert specs(Model(replace(even, head="tied"), mesh)).embedding == P(mesh.tp, None)
        assert specs(Model(replace(even, head="value"), mesh)).embedding == P(mesh.tp, None)


@pytest.mark.parametrize("vocab_size", [151_936, 128_256, 32_768])
def test_vocabularies_of_public_checkpoints_are_spread_over_eight(vocab_size):
    config = replace(ROUTED, vocab_size=vocab_size, num_heads=64, num_kv_heads=8)
    mesh = fold_abstract(Layout.parse("tp8 dp2 / ep8"))
    placed, whole = specs(Model(config, mesh)), shapes(config)
    held = [
        NamedSharding(mesh.mesh, spec).shard_shape(leaf.shape)
        for spec, leaf in ((placed.embedding, whole.embedding), (placed.head, whole.head))
    ]
    assert held == [(vocab_size // 8, 20), (20, vocab_size // 8)]


def test_shardings_split_the_experts():
    mesh = fold(Layout.parse("tp2 dp4 / ep8"), jax.devices()[:8])
    placed = shardings(Model(ROUTED, mesh)).layers.experts
    assert placed is not None
    assert isinstance(placed.gate_up, NamedSharding)
    assert placed.gate_up.shard_shape((3, 16, 20, 2, 14)) == (3, 2, 20, 2, 14)
    assert placed.router.is_fully_replicated
    with pytest.raises(ValueError, match="shardings need real devices: use fold"):
        shardings(Model(ROUTED, fold_abstract(Layout.parse("tp2 dp4 / ep8"))))


@pytest.mark.parametrize("places", [specs, shard_specs])
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_shard_specs_error_names_layout(places, layout):
    """By the layers with Gated DeltaNet, and not by how many layers of a kind a stack has."""
    delta = GatedDeltaNet((0,), 4, 4, key_head_dim=5, value_head_dim=6, conv_width=3)
    sharded = Execution(fsdp=True, remat="full")
    config = replace(ROUTED, num_layers=2, delta=delta, execution=sharded)
    with pytest.raises(ValueError, match=r"layout tp1 .*Gated DeltaNet"):
        places(Model(config, fold_abstract(Layout.parse(layout))))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=8), r"axis 'kv_head' of size 4 cannot be split over 8 devices \(layout tp8"),
        (Layout(dp=3, ep=3), r"axis 'expert' of size 16 cannot be split over 3 devices"),
        (Layout(tp=16, ep=16), r"axis 'head' of size 8 cannot be split over 16 devices"),
    ],
)
def test_specs_reject_sizes_that_do_not_divide(layout, message):
    with pytest.raises(ValueError, match=message):
        specs(Model(ROUTED, fold_abstract(layout)))
