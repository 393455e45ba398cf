"""`sharding.planner.volumes` equals what the network sends, byte for byte.

The difference between programs with one layer more and without it is that layer's. Programs are
traced for devices that need not exist.
"""

import functools
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from programs import mesh_of, on_mesh, random_weights
from tiers import full_but
from whole_network import loss_and_gradient, token_loss

from jrl.trainer.learner.accumulation import reduced_on_the_way
from jrl.trainer.learner.masters import gathered
from moe import model
from moe.config import ModelConfig
from moe.counts.sizes import sizes_of
from moe.execution import Execution
from moe.placement import in_chunks, shard_dims, shard_specs, specs, stored_specs
from moe.tokens.packing import pack_rows
from moe.weights import cast_shapes, shapes
from sharding import zero
from sharding.collectives import all_sum, vary
from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import groups
from sharding.planner import volumes
from sharding.planner.method import Batch, Method
from sharding.planner.transfer import repeated
from sharding.planner.validation.observed import of_compiled, of_jaxpr
from sharding.reduction import Reduction
from sharding.schedule import Schedule

# A distinct size for each axis, divisible where the layouts cut it.
TOY = ModelConfig(
    vocab_size=12,
    d_model=20,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=3,
    d_expert=14,
)
MIXTRAL = ModelConfig(
    vocab_size=32768,
    d_model=6144,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    experts_per_token=2,
    d_expert=16384,
    capacity_factor=1.0,
    dtype="bfloat16",
)
CONFIGS = {
    "toy": TOY,
    "half": replace(TOY, dtype="bfloat16"),
    "shared": replace(TOY, d_ff=28),
    "dense": replace(TOY, num_experts=0, d_ff=28),
    "full": replace(TOY, capacity_factor=0.8),
    "long": replace(TOY, num_experts=4),
    "mixtral": MIXTRAL,
    "dropless": replace(MIXTRAL, capacity_factor=None),
    "g8t8": replace(MIXTRAL, num_experts=64, experts_per_token=8, d_expert=2048),
    "llama": replace(MIXTRAL, vocab_size=128256, d_model=8192, num_heads=64, d_expert=28672),
    "qwen2": replace(
        MIXTRAL,
        vocab_size=151936,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        num_experts=64,
        experts_per_token=8,
        d_expert=2560,
        d_ff=20480,
        qkv_bias=True,
        shared_expert_gate=True,
    ),
}
# Config, layout, dispatch, context, remat. An axis alone is part of a larger layout.
LAYOUTS = [
    *("dp8 / ep8", "tp2 dp4", "tp4 / ep4", "tp2 dp4 / ep8"),
    "cp4 dp2 / ep8",
    "cp2 / etp2",
    "dp4 / ep2 etp2",
    "tp2 dp4 / ep4 etp2",
    "tp2 cp2 dp4 / ep8 etp2",
    "tp4 cp2 dp2 / ep16",
    "pp2 dp4 / ep4",
    "pp2 dp2 cp2 tp2 / ep4 etp2",
    "pp2 vpp2 dp2 cp2 tp2 / ep8",
]
ALL = "pp2 dp2 cp2 tp2 / ep4 etp2"
CASES = [
    *(("toy", layout, "all_gather", "gather", "none") for layout in LAYOUTS),
    *(("toy", layout, "all_to_all", "gather", "none") for layout in LAYOUTS if "ep" in layout),
    *(
        (name, layout, "ragged", "gather", remat)
        for name, layout, remat in (
            ("toy", "dp8 / ep8", "none"),
            ("toy", "tp2 dp4 / ep2 etp2", "none"),
            ("full", "tp2 cp2 dp4 / ep8 etp2", "selective"),
        )
    ),
    *(("toy", "cp4 dp2 / ep8", "all_gather", context, "none") for context in ("ring", "ulysses")),
    *(("toy", "cp2 tp2 pp2", "all_gather", context, "none") for context in ("ring", "ulysses")),
    *(
        ("half", "tp2 cp2 dp4 / ep8 etp2", dispatch, context, remat)
        for dispatch, context, remat in (
            ("all_gather", "ulysses", "selective"),
            ("all_to_all", "ring", "selective"),
            ("all_gather", "ring", "full"),
            ("all_to_all", "gather", "full"),
        )
    ),
    ("half", ALL, "all_to_all", "gather", "selective"),
    ("shared", "tp2 dp4 / ep4", "all_gather", "gather", "none"),
    ("shared", "pp2 tp2 dp2 / ep4", "all_to_all", "gather", "full"),
    ("dense", "tp2 dp4", "all_gather", "gather", "selective"),
    ("full", "tp2 cp2 / ep4", "all_to_all", "gather", "none"),
    # The mappings of Liu et al., "MoE Parallel Folding", 2025, tables 1, 3 and 5.
    ("mixtral", "tp2 dp8 pp8 / ep8", "all_to_all", "gather", "none"),
    ("mixtral", "tp2 dp8 pp8 / ep4 etp2", "all_to_all", "gather", "none"),
    ("mixtral", "tp2 cp4 dp2 pp8 / ep8", "all_to_all", "gather", "selective"),
    ("g8t8", "tp4 dp4 pp8 / ep8", "all_gather", "gather", "none"),
    ("g8t8", "tp8 dp16 / ep8", "all_gather", "gather", "full"),
    ("llama", "tp8 dp2 pp16 / ep8", "all_to_all", "gather", "none"),
    ("qwen2", "tp2 dp8 pp4 / ep4", "all_gather", "gather", "selective"),
]
QUICK = [
    ("toy", "tp2 dp4 / ep2 etp2", "ragged", "gather", "none"),
    ("toy", "dp8 / ep8", "all_to_all", "gather", "none"),
    ("dense", "tp2 dp4", "all_gather", "gather", "selective"),
]


def method_of(config):
    execution = config.execution
    return Method(
        execution.dispatch,
        execution.context,
        execution.remat,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        activation_wire=execution.activation_wire,
        expert_chunks=execution.expert_chunks,
        two_batch_overlap=execution.two_batch_overlap,
    )


def batch_of(config, layout):
    """Three rows of each ``dp`` rank in one micro-batch, or two that a pipeline runs one by one;
    seven or four in pairs where they are to be halved, and no half has as many as layers."""
    time = 4096 if config.d_model > 1000 else 8
    if config.num_experts == 4:
        time = 100
    halved = config.execution.two_batch_overlap
    if layout.pp > 1:
        micro_rows = 2 if halved else 1
        return Batch(2 * micro_rows * layout.dp, time, micro_rows)
    micro_rows = 7 if halved else 3
    return Batch(micro_rows * layout.dp, time, micro_rows)


def atoms(mesh, transfer):
    """The mesh axes of more than one device among those of a transfer's logical axes, on its side
    of sequence-parallel groups."""
    named = {atom for axis in transfer.axes for atom in getattr(mesh, axis)}
    if transfer.side == "inside":
        named &= set(mesh.sequence)
    if transfer.side == "across":
        named -= set(mesh.sequence)
    return frozenset(atom for atom in named if mesh.size((atom,)) > 1)


def schedule_of(batch, layout):
    return Schedule(layout.pp, batch.num_micro_batches(layout), layout.vpp)


def senders(schedule):
    """The stages that send in each permute, and the ticks of which parity it runs in."""
    return [
        (parity, {sender for sender, _ in pairs})
        for parity in (0, 1)
        for pairs in schedule.messages(parity)
        if pairs
    ]


@functools.cache
def traced(config, layout):
    mesh, batch = fold_abstract(Layout.parse(layout)), batch_of(config, Layout.parse(layout))
    shape = batch.rows, batch.time
    piece = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    weights = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    return list(of_jaxpr(jax.make_jaxpr(loss_and_gradient(config, mesh))(weights, piece).jaxpr))


def sent(config, layout):
    """Bytes that a device gives to collectives, of sums those of the routers where no
    pipeline has others of their shape: {(kind, mesh axes): bytes}."""
    sizes = Layout.parse(layout)
    mesh, found = fold_abstract(sizes), Counter()
    # Sums of a sequence and an expert; others are of a layer and an expert.
    streams = method_of(config).streams(batch_of(config, sizes))
    of_routers = [(rows.micro_rows, config.num_experts) for rows in streams]
    for one in traced(config, layout):
        over = frozenset(axis for axis in one.over if mesh.size((axis,)) > 1)
        is_load = sizes.pp == 1 and one.shape in of_routers
        if over and (one.kind != "all_reduce" or is_load):
            found[one.kind, over] += one.bytes
    return found


def given_to_collectives(program, mesh):
    """Bytes that a device gives to all collectives of a traced program, as `sent`."""
    found = Counter()
    for one in of_jaxpr(program.jaxpr):
        over = frozenset(axis for axis in one.over if mesh.size((axis,)) > 1)
        if over:
            found[one.kind, over] += one.bytes
    return found


def stated(transfers, layout):
    mesh = fold_abstract(layout)
    found = Counter()
    for transfer in transfers:
        if transfer.kind == "all_reduce" and (layout.pp > 1 or "load" not in transfer.what):
            continue
        found[transfer.kind, atoms(mesh, transfer)] += transfer.bytes
    return found


@pytest.mark.parametrize(
    ("name", "layout", "dispatch", "context", "remat"), full_but(CASES, *QUICK)
)
def test_a_layer_sends_what_is_stated(name, layout, dispatch, context, remat):
    check_layer(name, layout, Execution(dispatch=dispatch, context=context, remat=remat))


FP8_CASES = [
    *(("toy", "tp2 dp4 / ep2 etp2", dispatch, "none", 1) for dispatch in ("all_gather", "ragged")),
    ("half", "tp2 dp4 / ep4 etp2", "all_to_all", "selective", 1),
    # More than one group of tokens.
    ("full", "dp4 / ep2 etp2", "all_to_all", "full", 2),
    ("long", "dp4 / ep4", "ragged", "none", 1),
    ("long", "dp4 / ep2 etp2", "all_gather", "selective", 2),
    ("long", "dp4 / ep4", "all_to_all", "none", 5),
]


@pytest.mark.parametrize(
    ("name", "layout", "dispatch", "remat", "chunks"), full_but(FP8_CASES, FP8_CASES[2])
)
def test_tokens_in_fp8_and_in_chunks_send_what_is_stated(name, layout, dispatch, remat, chunks):
    execution = Execution(
        dispatch=dispatch,
        context="gather",
        remat=remat,
        activation_wire="float8_e4m3fn",
        expert_chunks=chunks,
    )
    check_layer(name, layout, execution)


@pytest.mark.parametrize("dispatch", full_but(["all_gather", "all_to_all", "ragged"], "all_gather"))
def test_chunks_send_what_is_stated(dispatch):
    """Twenty-four tokens in five chunks, with a capacity that some of them do not reach."""
    execution = Execution(dispatch=dispatch, context="gather", expert_chunks=5)
    check_layer("full", "dp4 / ep4", execution)


HALVES = [
    # Of seven rows four go first; of their tokens, in chunks, some have one more.
    ("toy", "tp2 dp4 / ep4 etp2", {"dispatch": "all_to_all", "expert_chunks": 3}),
    ("toy", "tp2 cp2 dp4 / ep8 etp2", {"dispatch": "all_gather", "remat": "selective"}),
    ("shared", "tp2 dp4 / ep4", {"dispatch": "ragged", "remat": "full"}),
    ("dense", "tp2 dp4", {"dispatch": "all_gather"}),
    (
        *("long", "tp2 dp2 / ep4"),
        {"dispatch": "all_gather", "activation_wire": "float8_e4m3fn", "remat": "selective"},
    ),
    ("half", "cp4 dp2 / ep8", {"dispatch": "all_gather", "context": "ulysses"}),
    ("half", "tp2 cp2", {"dispatch": "all_gather", "context": "ring", "remat": "selective"}),
    ("toy", ALL, {"dispatch": "all_to_all", "remat": "selective"}),
    ("toy", "pp2 vpp2 dp2 cp2 tp2 / ep8", {"dispatch": "all_gather", "remat": "full"}),
    ("dropless", "tp2 dp8 pp8 / ep8", {"dispatch": "all_to_all", "remat": "selective"}),
]


@pytest.mark.parametrize(("name", "layout", "execution"), full_but(HALVES, HALVES[3]))
def test_two_halves_send_what_is_stated(name, layout, execution):
    """In a layer, and in all that a program of one layer sends."""
    execution = Execution(**{"context": "gather", **execution}, two_batch_overlap=True)
    check_layer(name, layout, execution)
    check_rest(name, layout, execution)


def check_layer(name, layout, execution):
    config, sizes = replace(CONFIGS[name], execution=execution), Layout.parse(layout)
    chunks = sizes.pp * sizes.vpp
    fewer, more = (replace(config, num_layers=number * chunks) for number in (1, 2))
    found = sent(more, layout) - sent(fewer, layout)

    batch = batch_of(config, sizes)
    method = method_of(config)
    forward, backward = volumes.layer(sizes_of(config), sizes, batch, method)
    passes = forward + backward
    if sizes.pp > 1:
        # A tick's program has both ways through a chunk, of which a stage goes one or none.
        passes = repeated(passes, schedule_of(batch, sizes).ticks)
    assert found == stated(passes, sizes)
    assert found or sizes.tp * sizes.cp * sizes.ep * sizes.etp == 1


@pytest.mark.parametrize(
    ("name", "layout"),
    full_but(
        [
            ("toy", "tp2 cp2 dp4 / ep8 etp2"),
            ("dense", "tp2 dp4"),
            ("toy", ALL),
            ("toy", "pp2 vpp2 tp2"),
            ("mixtral", "tp2 cp4 dp2 pp8 / ep8"),
        ],
        ("dense", "tp2 dp4"),
    ),
)
def test_the_rest_of_a_step_sends_what_is_stated(name, layout):
    """The head, and the hops of a pipeline: what a program without its layers sends."""
    check_rest(name, layout, Execution(dispatch="all_to_all", context="gather"))


def check_rest(name, layout, execution):
    sizes = Layout.parse(layout)
    config = replace(CONFIGS[name], execution=execution, num_layers=sizes.pp * sizes.vpp)
    sized, method, batch = sizes_of(config), method_of(config), batch_of(config, sizes)
    tokens = batch.local_tokens(sizes)
    forward, backward = volumes.layer(sized, sizes, batch, method)
    embedding = volumes.embedding(sized, sizes, tokens, method)
    passes = [*forward, *backward, *embedding, *volumes.head(sized, sizes, tokens, method)]
    passes += volumes.in_rows(sized, sizes, batch, method)
    if sizes.pp > 1:
        schedule = schedule_of(batch, sizes)
        # A tick's program has the permutes of even ticks and those of odd ones.
        hops = [volumes.hop(sized, tokens, method)] * len(senders(schedule))
        passes = repeated([*passes, *hops], schedule.ticks)
    assert sent(config, layout) == stated(passes, sizes)


@pytest.mark.parametrize("layout", ["pp4 dp2", "pp3 vpp2 dp2", "pp2 vpp2"])
def test_a_middle_stage_hands_on_as_often_as_the_schedule_says(layout):
    sizes, batch, sized = Layout.parse(layout), Batch(12, 8), sizes_of(replace(TOY, num_layers=12))
    schedule = schedule_of(batch, sizes)
    ticks = Counter(tick % 2 for tick in range(schedule.ticks))
    expected = sum(ticks[parity] for parity, stages in senders(schedule) if 1 in stages)
    sent = volumes.step(sized, sizes, batch, Method())
    assert sum(one.times for one in sent if one.axes == ("pp",)) == expected


def test_a_step_has_the_layers_of_the_deepest_stage():
    sizes, batch = Layout.parse("pp3 vpp2 tp2"), Batch(4, 8)
    of = [
        [one for one in volumes.step(model, sizes, batch, Method()) if "attention" in one.what]
        for model in (sizes_of(replace(TOY, num_layers=number)) for number in (11, 12, 13))
    ]
    assert of[0] == of[1]
    assert [2 * one.times for one in of[2]] == [3 * one.times for one in of[1]]


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
def test_gradients_are_summed_in_what_is_stated(name, layout):
    sizes = Layout.parse(layout)
    config, mesh = replace(CONFIGS[name], num_layers=2 * sizes.pp), fold_abstract(sizes)
    places, parts = specs(config, mesh), shard_specs(config, mesh)
    cuts = shard_dims(config, mesh)

    def local(weights):
        grads = vary(weights, mesh.axes)
        return jax.tree.map(partial(zero.reduce_scatter, mesh), places, cuts, grads)

    summed = jax.shard_map(local, mesh=mesh.mesh, in_specs=(places,), out_specs=parts)
    found = given_to_collectives(jax.make_jaxpr(summed)(shapes(config)), mesh)
    expected = volumes.gradients(sizes_of(config), sizes, Method(storage="float32"))
    assert found == stated([t for t in expected if t.kind == "reduce_scatter"], sizes)


def test_gradients_in_bfloat16_are_stated():
    """Inside a sequence-parallel group float32, across it terms of two bytes."""
    sizes = Layout.parse("tp2 cp4 dp4 / ep4")
    config, mesh = replace(MIXTRAL, num_layers=2), fold_abstract(sizes)
    places, parts = specs(config, mesh), shard_specs(config, mesh)
    cuts = shard_dims(config, mesh, "bfloat16")

    def local(weights):
        grads = vary(weights, mesh.axes)
        return jax.tree.map(partial(zero.reduce_scatter, mesh), places, cuts, grads)

    summed = jax.shard_map(local, mesh=mesh.mesh, in_specs=(places,), out_specs=parts)
    found = given_to_collectives(jax.make_jaxpr(summed)(shapes(config)), mesh)
    expected = volumes.gradients(sizes_of(config), sizes, Method(gradient_wire="bfloat16"))
    assert found == stated([t for t in expected if t.kind != "all_gather"], sizes)
    assert {t.kind for t in expected if t.side == "across"} == {"all_to_all", "all_gather"}


ON_THE_WAY = [
    ("tp2 cp4 dp4 / ep4", "float32", {}),
    (
        *("tp2 cp2 dp4 / ep4 etp2", "bfloat16"),
        {"remat": "selective", "expert_chunks": 2, "two_batch_overlap": True},
    ),
    ("tp2 dp4 / ep4", "float32", {"remat": "full", "fsdp": True}),
]


@pytest.mark.parametrize(("layout", "wire", "execution"), full_but(ON_THE_WAY, ON_THE_WAY[0]))
def test_a_step_with_gradients_on_their_way_sends_what_is_stated(layout, wire, execution):
    """All but new weights, which come afterwards, or where they are kept in shards those of both
    ends, which come first: three micro-batches, of which the last one sums each layer's gradient
    when it has left the layer."""
    sizes = Layout.parse(layout)
    given = {"dispatch": "all_to_all", "context": "gather", **execution}
    execution = Execution(overlap_grad_reduce=True, **given)
    config = replace(CONFIGS["dropless"], num_layers=2, execution=execution)
    mesh, batch = fold_abstract(sizes), Batch(3 * 2 * sizes.dp, 4096, micro_rows=2)
    stored, parts = stored_specs(config, mesh), shard_specs(config, mesh)
    cuts, is_sharded = shard_dims(config, mesh, wire), execution.fsdp
    of_layers = jax.tree.map(lambda _: is_sharded, cuts.layers)
    shared = replace(jax.tree.map(lambda _: False, cuts), layers=of_layers)
    reductions = jax.tree.map(partial(Reduction, mesh), specs(config, mesh), cuts, shared)

    def local(weights, piece):
        own = vary(weights, mesh.axes)
        if is_sharded:
            names = ("embedding", "norm", "head")
            ends, of_ends = ({name: getattr(x, name) for name in names} for x in (own, cuts))
            own = replace(own, **zero.unshard(ends, of_ends))
        micro_batches = jax.tree.map(lambda x: x.reshape(3, 2, -1), piece)

        def loss_of(own, piece, mark):
            packed = pack_rows(*piece, mesh, config)
            of_layers = cuts.layers if is_sharded else None
            x, _ = model.run(mark(own), packed, config, mesh, of_layers)
            one = jnp.int32(1)
            return all_sum(token_loss(own, x, piece, one, config, mesh), mesh.except_sequence), {}

        return reduced_on_the_way(loss_of, own, reductions, micro_batches, None, mesh.axes)[1]

    step = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(stored, PartitionSpec(mesh.dp)), out_specs=parts
    )
    shape = batch.rows, batch.time
    piece = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    found = given_to_collectives(jax.make_jaxpr(step)(shapes(config), piece), mesh)
    method = replace(method_of(config), overlap_grad_reduce=True, gradient_wire=wire)
    transfers = volumes.step(sizes_of(config), sizes, batch, replace(method, fsdp=is_sharded))
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
    gather = jax.make_jaxpr(lambda masters: gathered(masters, config, mesh))
    found = given_to_collectives(gather(shapes(config)), mesh)
    expected = volumes.gradients(sizes_of(config), sizes, Method(storage="bfloat16"))
    assert found == stated([t for t in expected if t.kind == "all_gather"], sizes)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_layers_are_joined_from_shards_as_stated(storage):
    execution = Execution(remat="full", fsdp=True)
    config = replace(MIXTRAL, num_layers=4, execution=execution, dtype=storage)
    sizes = Layout.parse("tp2 dp8 pp2 / ep4")
    mesh = fold_abstract(sizes)
    cuts, stored = shard_dims(config, mesh).layers, stored_specs(config, mesh).layers

    def local(layers):
        joined = zero.unshard(layers, cuts)
        return jax.tree.map(lambda x: jnp.sum(x)[None], joined)

    joined = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(stored,), out_specs=PartitionSpec(mesh.axes)
    )
    found = given_to_collectives(jax.make_jaxpr(joined)(cast_shapes(config).layers), mesh)
    method = Method(fsdp=True, storage=storage)
    assert found == stated(volumes.unsharding(sizes_of(config), sizes, method), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "dispatch", "overlap"),
    [
        ("toy", "tp2 dp4 / ep8", "all_to_all", {}),
        ("toy", "tp2 dp4 / ep4 etp2", "all_to_all", {}),
        ("toy", "tp2 cp2 dp2 / ep4", "all_gather", {}),
        ("toy", "tp2 cp2 dp4 / ep8 etp2", "all_gather", {}),
        ("shared", "tp2 dp4 / ep8", "all_to_all", {}),
        ("dense", "tp2 dp4 / ep8", "all_gather", {}),
        ("toy", "tp2 dp4 / ep4 etp2", "all_to_all", {"expert_chunks": 3}),
        ("toy", "tp2 cp2 dp2 / ep4", "all_gather", {"two_batch_overlap": True}),
    ],
)
def test_a_compiled_layer_sends_what_is_stated(name, layout, dispatch, overlap):
    execution = Execution(dispatch=dispatch, context="gather", **overlap)
    config, mesh = replace(CONFIGS[name], num_layers=1, execution=execution), mesh_of(layout)
    by_row = PartitionSpec(mesh.dp)

    def local(weights, tokens, valid):
        x, stats = model.hidden(weights, tokens, valid, config, mesh)
        return x, jax.tree.map(jnp.atleast_1d, stats)

    forward = on_mesh(local, mesh, (specs(config, mesh), by_row, by_row), PartitionSpec(mesh.axes))
    batch = batch_of(config, mesh.layout)
    tokens = jnp.ones((batch.rows, batch.time), jnp.int32)
    compiled = forward.lower(random_weights(config, 0), tokens, tokens > 0).compile()
    found, expected = Counter(), Counter()
    for one in of_compiled(compiled.as_text()):
        found[one.kind, one.over] += one.bytes
    sizes, tokens = (sizes_of(config), mesh.layout), batch.local_tokens(mesh.layout)
    transfers = [
        *volumes.embedding(*sizes, tokens, method_of(config))[:1],
        *volumes.layer(*sizes, batch, method_of(config))[0],
    ]
    back = volumes.in_rows(*sizes, batch, method_of(config))
    transfers += [one for one in back if one.kind == "all_gather"]
    for one in transfers:
        axes = [atom for axis in one.axes for atom in getattr(mesh, axis)]
        expected[one.kind, tuple(map(tuple, groups(mesh, axes)))] += one.bytes
    assert found == expected
