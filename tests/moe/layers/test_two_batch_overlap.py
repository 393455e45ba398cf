"""Two halves of the rows through a layer: what all at once give, and that nothing orders them."""

import functools
import re
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_graph import Graph
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from tiers import full_but
from whole_network import loss_and_gradient

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.layers.two_batch_overlap import restore_row_order
from moe.placement import in_chunks, specs
from moe.tokens.packing import pack_rows, pack_segments, pack_shared_prompts
from sharding.collectives import join_shards, local_shard, vary

ROWS, TIME = 12, 8
CONFIG = ModelConfig(
    vocab_size=12,
    num_layers=2,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=8,
    experts_per_token=3,
    d_expert=14,
    batch_balance_coef=0.3,
    global_balance_coef=0.2,
)


def with_execution(config=CONFIG, **execution):
    return replace(config, execution=Execution(**execution))


def piece():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, CONFIG.vocab_size, (ROWS, TIME)).astype(np.int32)
    # A different number of tokens in each row.
    return tokens, np.arange(TIME)[None] < 3 + np.arange(ROWS)[:, None]


@functools.cache
def compiled(layout, config):
    mesh = mesh_of(layout)
    given = in_chunks(random_weights(config, 0), mesh), piece()
    return jit(loss_and_gradient(config, mesh)).lower(*given).compile()(*given)


def same(layout, config):
    """Loss, router sums and gradients with and without halves."""
    halved = replace(config, execution=replace(config.execution, two_batch_overlap=True))
    found, expected = (jax.device_get(compiled(layout, one)) for one in (halved, config))
    # float32 sums of at most a few hundred terms, in two parts.
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=3e-6)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(found[1]))


CASES = [
    # Three rows a device: halves of two rows and of one.
    (
        "tp2 cp2 dp2 / ep4",
        {"dispatch": "all_to_all", "remat": "selective", "expert_chunks": 2},
    ),
    (
        "tp2 cp2 dp2 / ep8",
        {"dispatch": "two_level", "server_devices": 2, "remat": "selective", "expert_chunks": 2},
    ),
    # Of two stages the last has a layer less.
    ("pp2 dp2 / ep2", {"remat": "full", "scan_layers": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "execution"), CASES)
def test_two_batch_overlap_equals_whole_batch(layout, execution):
    depth = 3 if "pp" in layout else 1
    same(layout, with_execution(replace(CONFIG, num_layers=depth), **execution))


def half_of(scope):
    found = set(re.findall(r"\bhalf_(\d)\b", scope))
    return int(found.pop()) if len(found) == 1 else None


@pytest.mark.slow
def test_nothing_orders_two_halves():
    """Neither half's collectives wait for the other's products, nor these for them, in the whole
    network forward and backward, recomputation included; within one half they do."""
    config = with_execution(
        two_batch_overlap=True,
        remat="selective",
        dispatch="all_to_all",
        scan_layers=False,
    )
    mesh = mesh_of("tp2 / ep2")
    given = random_weights(config, 0), piece()
    program = jit(loss_and_gradient(config, mesh)).lower(*given).compile()
    graph = Graph.of(program.as_text())
    before = {name: graph.before(name) for name in graph.entry}
    for backward in (False, True):
        sent = [
            (x.name, half_of(x.scope))
            for x in graph.collectives()
            if half_of(x.scope) is not None and ("transpose(" in x.scope) is backward
        ]
        multiplied = [
            (x.name, half_of(scope))
            for x, scope in graph.products()
            if half_of(scope) is not None and ("transpose(" in scope) is backward
        ]
        assert {half for _, half in sent} == {half for _, half in multiplied} == {0, 1}
        # Tokens gathered and scattered, and to the experts and back; products of each matrix.
        assert len(sent) >= 2 * 2 * 4 and len(multiplied) >= 2 * 2 * 4
        for a, own in sent:
            for b, other in multiplied:
                if own != other:
                    assert a not in before[b] and b not in before[a], (a, b)
        assert any(a in before[b] for a, own in sent for b, half in multiplied if half == own)
        assert any(b in before[a] for a, own in sent for b, half in multiplied if half == own)


def packed_by(how, config, mesh):
    network = Model(config, mesh)
    tokens, valid = map(jnp.asarray, piece())
    if how == "rows":
        return pack_rows(tokens, valid, network)
    if how == "segments":
        segments = jnp.where(
            valid, 1 + 2 * jnp.arange(ROWS)[:, None] + jnp.arange(TIME)[None] // 4, 0
        )
        return pack_segments(tokens, segments, 2 * ROWS, network)
    return pack_shared_prompts(tokens, valid, 4, 2, network)


@pytest.mark.parametrize("how", full_but(["rows", "segments", "prompts"], "prompts"))
def test_halves_are_undone_in_the_order_of_rows(how):
    """By the tokens themselves; the halves have the positions and pieces of their rows."""
    config, mesh = with_execution(two_batch_overlap=True), mesh_of("tp2 cp2")

    def local():
        whole, halved = (packed_by(how, one, mesh) for one in (with_execution(), config))
        assert len(halved.half_batches) == 2 and all(
            half.is_half_batch for half in halved.half_batches
        )
        own = local_shard(vary(halved.tokens, mesh.sequence), mesh.sequence)
        back = restore_row_order(own, halved, mesh)
        marks = [
            jnp.sort(jnp.concatenate([x.tokens * 100 + x.positions for x in batches]))
            for batches in (halved.half_batches, (whole,))
        ]
        return join_shards(back, mesh.sequence), whole.tokens, *marks

    back, tokens, *marks = on_mesh(local, mesh, (), P())()
    np.testing.assert_array_equal(back, tokens)
    np.testing.assert_array_equal(*marks)


@pytest.mark.slow
def test_recorded_choices_are_in_the_order_of_rows():
    mesh = mesh_of("tp2 cp2")

    def chosen(config):
        spec = specs(Model(config, mesh))
        run = functools.partial(model.routing_choices, model=Model(config, mesh))
        # Typed as varying over axes of one device each.
        out = P(None, mesh.except_sequence)
        return on_mesh(run, mesh, (spec, P(), P()), out)(random_weights(config, 0), *piece())

    found, expected = (chosen(with_execution(two_batch_overlap=x)) for x in (True, False))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_two_batch_overlap_rejects_capacity():
    tokens, valid = map(jnp.asarray, piece())
    mesh, asked = mesh_of("tp4"), with_execution(two_batch_overlap=True)
    network = Model(asked, mesh)
    full = replace(asked, capacity_factor=0.8)
    with pytest.raises(ValueError, match=r"capacity_factor=0\.8 would drop other tokens"):
        pack_rows(tokens, valid, Model(full, mesh))
    # A single row, and halves of ten tokens on four ranks, go at once: an update is refused before.
    assert pack_rows(tokens[:1], valid[:1], network).half_batches == ()
    assert pack_rows(tokens[:4, :5], valid[:4, :5], network).half_batches == ()
    assert len(pack_rows(tokens[:4, :4], valid[:4, :4], network).half_batches) == 2
