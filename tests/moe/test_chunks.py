"""Layers that stages do not share evenly."""

from dataclasses import replace

import chex
import numpy as np
import pytest
from programs import random_weights
from tiers import full_but

from moe.config import GatedDeltaNet, Model, ModelConfig
from moe.placement import (
    first_layers_of_chunks,
    in_chunks,
    in_layer_order,
    layers_per_chunk,
    specs,
    stored_depth,
    stored_specs,
    without_chunks,
)
from sharding.folding import Layout, fold_abstract

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=7,
    d_model=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_experts=3,
    experts_per_token=2,
    d_expert=5,
)


@pytest.mark.parametrize("num_layers", [58, 94])
@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (8, 1), (16, 1), (4, 2), (8, 3)])
def test_chunks_differ_by_one_layer(num_layers, pp, vpp):
    """DeepSeek-V3 after its dense layers, and Qwen3-235B."""
    mesh = fold_abstract(Layout(pp=pp, vpp=vpp))
    found = layers_per_chunk(num_layers, mesh)
    depth = stored_depth(num_layers, mesh)
    assert len(found) == pp * vpp and sum(found) == num_layers
    assert set(found) == {depth, depth - 1} or set(found) == {depth}
    # The shallow ones at both ends.
    shallow = [chunk for chunk, number in enumerate(found) if number < depth]
    deep = [chunk for chunk, number in enumerate(found) if number == depth]
    at_the_start = sum(chunk < deep[0] for chunk in shallow)
    assert deep == list(range(deep[0], deep[-1] + 1))
    assert len(shallow) - at_the_start - at_the_start in (0, 1)
    assert [sum(found[:chunk]) for chunk in range(len(found))] == list(
        first_layers_of_chunks(num_layers, mesh)
    )


def test_the_chunks_of_two_published_models():
    def on(num_layers, pp):
        return layers_per_chunk(num_layers, fold_abstract(Layout(pp=pp)))

    assert on(94, 16) == (5, *[6] * 14, 5)
    assert on(58, 4) == (14, 15, 15, 14)
    assert on(58, 16) == (3, 3, 3, *[4] * 10, 3, 3, 3)


@pytest.mark.parametrize(
    ("layers", "layout", "message"),
    [
        ((0, 2), Layout(cp=2), "needs full sequences, which cp splits"),
        # Chunks of two layers, of which one has it in its second; chunks of two layers and of one.
        ((0, 3), Layout(pp=2), r"into 2 chunks with different layer types .* \(0, 3\)\)"),
        ((0, 1), Layout(pp=3), "num_layers=4 into 3 chunks with different layer types"),
    ],
)
def test_gated_delta_net_refuses_layouts(layers, layout, message):
    config = replace(CONFIG, num_layers=4, delta=GatedDeltaNet(layers, 2, 4, 5, 6, 4))
    with pytest.raises(ValueError, match=message):
        specs(Model(config, fold_abstract(layout)))
    alike = replace(config, delta=replace(config.delta, layers=(0, 2)))
    specs(Model(alike, fold_abstract(Layout(pp=2))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", full_but(["pp3", "pp2 vpp2", "pp4", "pp5", "pp2 dp2", "pp7"], "pp3", "pp2 vpp2")
)
def test_weights_come_back_in_order_and_without_padding(layout):
    mesh = fold_abstract(Layout.parse(layout))
    weights = random_weights(CONFIG, 0)
    stored = in_chunks(weights, mesh)
    back = in_layer_order(stored, mesh, CONFIG.num_layers)
    chex.assert_trees_all_equal(back, weights)
    # Each chunk has its layers in front; what comes after them is zero.
    depth, chunks = stored_depth(CONFIG.num_layers, mesh), mesh.layout.pp * mesh.layout.vpp
    norm = np.asarray(stored.layers.norm).reshape(chunks, depth, -1)
    for chunk, (number, first) in enumerate(
        zip(
            layers_per_chunk(CONFIG.num_layers, mesh),
            first_layers_of_chunks(CONFIG.num_layers, mesh),
            strict=True,
        )
    ):
        own = weights.layers.norm[first : first + number]
        np.testing.assert_array_equal(norm[chunk, :number], own)
        assert np.count_nonzero(norm[chunk, number:]) == 0


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_has_no_padding(fsdp):
    execution = replace(CONFIG.execution, remat="full", fsdp=fsdp)
    config = replace(CONFIG, execution=execution)
    mesh = fold_abstract(Layout.parse("pp2 dp2"))
    plain = without_chunks(Model(config, mesh))
    assert in_chunks(random_weights(config, 0), plain.mesh).layers.norm.shape == (7, 12)
    experts = stored_specs(plain).layers.experts
    assert experts is not None
    placed = experts.router
    # Whole along the layers; in shards, over the stages too.
    assert placed[0] is None
    assert (placed[1] == mesh.axes[:2]) == fsdp
    even = replace(config, num_layers=6)
    assert specs(without_chunks(Model(even, mesh))).layers.norm[0] == "pp"
