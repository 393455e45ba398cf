"""Sums of gradients and gathers of weights send what `moe.planner.volumes` states."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from traced_volumes import CONFIGS, MIXTRAL, given_to_collectives, method_of, stated
from whole_network import token_loss

from jrl.trainer.learner.accumulation import accumulate_with_overlapped_reduction
from jrl.trainer.learner.learner import cast_and_gather
from moe import model
from moe.config import Model
from moe.execution import Execution
from moe.placement import shard_dims, shard_specs, specs, stored_specs
from moe.planner import volumes
from moe.planner.method import Batch, Method, with_fields
from moe.planner.models import sizes_of
from moe.tokens.packing import pack_rows
from moe.weights import cast_shapes, shapes
from sharding import zero
from sharding.collectives import all_sum, vary
from sharding.folding import Layout, fold_abstract
from sharding.zero import Reduction


def summed_gradients(name, sizes, wire):
    """Transfers of gradients that the planner states, and the traced ones."""
    config, mesh = replace(CONFIGS[name], num_layers=2 * sizes.pp), fold_abstract(sizes)
    network = Model(config, mesh)
    places, parts, cuts = specs(network), shard_specs(network), shard_dims(network, wire)

    def local(weights):
        grads = vary(weights, mesh.axes)
        return jax.tree.map(partial(zero.reduce_scatter, mesh), places, cuts, grads)

    summed = jax.shard_map(local, mesh=mesh.mesh, in_specs=(places,), out_specs=parts)
    observed = given_to_collectives(jax.make_jaxpr(summed)(shapes(config)), mesh)
    return volumes.gradients(sizes_of(config), sizes, Method(gradient_wire=wire)), observed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", "tp2 dp8 pp8 / ep8"),
        ("mixtral", "tp2 dp8 pp8 / ep4 etp2"),
        ("g8t8", "tp4 dp4 pp8 / ep8"),
        ("llama", "tp8 dp2 pp16 / ep8"),
        ("llama", "tp8 dp4 pp8 / ep4 etp8"),
        ("mixtral", "tp2 cp4 dp2 pp8 / ep8"),
        ("g8t8", "tp8 dp16 / ep8"),
        # Ranks with the same experts lie inside sequence-parallel groups and across them.
        ("mixtral", "tp2 cp4 dp4 / ep4"),
    ],
)
def test_gradient_volumes_equal_traced_sums(name, layout):
    sizes = Layout.parse(layout)
    expected, observed = summed_gradients(name, sizes, "float32")
    assert observed == stated([t for t in expected if t.kind == "reduce_scatter"], sizes)


def test_gradients_in_bfloat16_are_stated():
    """Inside a sequence-parallel group float32, across it terms of two bytes."""
    layout = Layout.parse("tp2 cp4 dp4 / ep4")
    expected, observed = summed_gradients("mixtral", layout, "bfloat16")
    assert observed == stated([t for t in expected if t.kind != "all_gather"], layout)
    assert {t.kind for t in expected if t.side == "across"} == {"all_to_all", "all_gather"}


ON_THE_WAY = [
    ("tp2 cp4 dp4 / ep4", "float32", {}),
    (
        *("tp2 cp2 dp4 / ep4 etp2", "bfloat16"),
        {"remat": "selective", "expert_chunks": 2, "two_batch_overlap": True},
    ),
    ("tp2 dp4 / ep4", "float32", {"remat": "full", "fsdp": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "wire", "execution"), ON_THE_WAY)
def test_step_volumes_equal_traced_overlapped_reduction(layout, wire, execution):
    """All but new weights, gathered afterwards; if kept in shards, all but both ends' weights,
    gathered first: three micro-batches, of which the last one sums each layer's gradient when it
    has left the layer."""
    sizes = Layout.parse(layout)
    given = {"dispatch": "all_to_all", "context": "gather", **execution}
    execution = Execution(overlap_grad_reduce=True, **given)
    config = replace(CONFIGS["dropless"], num_layers=2, execution=execution)
    mesh, batch = fold_abstract(sizes), Batch(3 * 2 * sizes.dp, 4096, micro_rows=2)
    network = Model(config, mesh)
    stored, parts = stored_specs(network), shard_specs(network)
    cuts, is_sharded = shard_dims(network, wire), execution.fsdp
    of_layers = jax.tree.map(lambda _: is_sharded, cuts.layers)
    shared = replace(jax.tree.map(lambda _: False, cuts), layers=of_layers)
    reductions = jax.tree.map(partial(Reduction, mesh), specs(network), cuts, shared)

    def local(weights, piece):
        own = vary(weights, mesh.axes)
        if is_sharded:
            names = ("embedding", "norm", "head")
            ends, of_ends = ({name: getattr(x, name) for name in names} for x in (own, cuts))
            own = replace(own, **zero.unshard(ends, of_ends))
        micro_batches = jax.tree.map(lambda x: x.reshape(3, 2, -1), piece)

        def loss_of(own, piece):
            packed = pack_rows(*piece, network)
            of_layers = cuts.layers if is_sharded else None
            x, _ = model.run(own, packed, network, of_layers)
            one = jnp.int32(1)
            return all_sum(token_loss(own, x, piece, one, config, mesh), mesh.except_sequence), {}

        return accumulate_with_overlapped_reduction(
            loss_of, own, reductions, micro_batches, None, mesh.axes
        )[1]

    step = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(stored, PartitionSpec(mesh.dp)), out_specs=parts
    )
    shape = batch.rows, batch.time
    piece = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    found = given_to_collectives(jax.make_jaxpr(step)(shapes(config), piece), mesh)
    method = with_fields(method_of(config), overlap_grad_reduce=True, gradient_wire=wire)
    transfers = volumes.step(sizes_of(config), sizes, batch, replace(method, reshards=is_sharded))
    expected = [
        one
        for one in transfers
        if one.kind != "all_reduce" and (is_sharded or not one.what.startswith("new weights"))
    ]
    moved = Counter({key: sent for key, sent in found.items() if key[0] != "all_reduce"})
    assert moved == stated(expected, sizes)


@pytest.mark.parametrize(
    "layout", ["tp2 dp8 pp8 / ep4 etp2", "tp8 dp2 pp16 / ep8", "tp2 cp4 dp2 pp8 / ep4"]
)
def test_new_weights_are_gathered_as_stated(layout):
    sizes = Layout.parse(layout)
    config, mesh = replace(MIXTRAL, num_layers=2 * sizes.pp), fold_abstract(sizes)
    gather = jax.make_jaxpr(lambda masters: cast_and_gather(masters, Model(config, mesh)))
    found = given_to_collectives(gather(shapes(config)), mesh)
    expected = volumes.gradients(sizes_of(config), sizes, Method(storage="bfloat16"))
    assert found == stated([t for t in expected if t.kind == "all_gather"], sizes)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_layers_are_joined_from_shards_as_stated(storage):
    execution = Execution(remat="full", fsdp=True)
    config = replace(MIXTRAL, num_layers=4, execution=execution, dtype=storage)
    sizes = Layout.parse("tp2 dp8 pp2 / ep4")
    mesh = fold_abstract(sizes)
    network = Model(config, mesh)
    cuts, stored = shard_dims(network).layers, stored_specs(network).layers

    def local(layers):
        joined = zero.unshard(layers, cuts)
        return jax.tree.map(lambda x: jnp.sum(x)[None], joined)

    joined = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(stored,), out_specs=PartitionSpec(mesh.axes)
    )
    found = given_to_collectives(jax.make_jaxpr(joined)(cast_shapes(config).layers), mesh)
    method = Method(reshards=True, storage=storage)
    assert found == stated(volumes.unsharding(sizes_of(config), sizes, method), sizes)
