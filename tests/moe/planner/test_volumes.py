"""`moe.planner.volumes` equals what the network sends, byte for byte.

The difference between programs with one layer more and without it is that layer's. Programs are
traced for devices that need not exist.
"""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from observed_collectives import hlo_collectives
from programs import mesh_of, on_mesh, random_weights
from tiers import full_but
from traced_volumes import (
    CONFIGS,
    TOY,
    batch_of,
    method_of,
    schedule_of,
    sent,
    stated,
    stated_group,
)

from moe import model
from moe.config import Model
from moe.execution import Execution
from moe.placement import specs
from moe.planner import volumes
from moe.planner.method import Batch, Method
from moe.planner.models import sizes_of
from moe.planner.volumes import repeat_transfers
from sharding.folding import Layout
from sharding.folding.groups import axis_groups

ALL = "pp2 dp2 cp2 tp2 / ep4 etp2"
INTERLEAVED = "pp2 vpp2 dp2 cp2 tp2 / ep8"
# An axis alone is part of a larger layout. What attention sends does not hang on how tokens go to
# the experts: each of the others has one of the two ways.
GATHERED = [
    *("dp8 / ep8", "tp2 dp4", "tp4 / ep4", "cp4 dp2 / ep8", "dp4 / ep2 etp2"),
    *("tp2 cp2 dp4 / ep8 etp2", "pp2 dp4 / ep4", ALL, INTERLEAVED),
]
TRADED = [
    *("tp2 dp4 / ep8", "cp2 / etp2", "tp2 dp4 / ep4 etp2", "tp4 cp2 dp2 / ep16"),
    *(ALL, INTERLEAVED),
]
# Config, layout, dispatch, context, remat.
CASES = [
    *(("toy", layout, "all_gather", "gather", "none") for layout in GATHERED),
    *(("toy", layout, "all_to_all", "gather", "none") for layout in TRADED),
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
    *(("toy", f"cp{cp} pp2", "all_gather", "ring", "none") for cp in (4, 6)),
    *(
        ("half", "tp2 cp2 dp4 / ep8 etp2", dispatch, context, remat)
        for dispatch, context, remat in (
            ("all_gather", "ulysses", "selective"),
            ("all_to_all", "ring", "selective"),
            ("all_gather", "ring", "full"),
            ("all_to_all", "gather", "full"),
            ("all_gather", "ulysses", "projections"),
            ("all_to_all", "gather", "projections"),
        )
    ),
    ("half", ALL, "all_to_all", "gather", "selective"),
    ("shared", "tp2 dp4 / ep4", "all_gather", "gather", "none"),
    ("shared", "pp2 tp2 dp2 / ep4", "all_to_all", "gather", "full"),
    ("dense", "tp2 dp4", "all_gather", "gather", "selective"),
    ("full", "tp2 cp2 / ep4", "all_to_all", "gather", "none"),
    # Norms of queries and keys, and latent attention: what is kept is not what attention reads.
    *(
        ("normed", layout, "all_gather", context, remat)
        for layout, context, remat in (
            ("cp4 dp2 / ep8", "ulysses", "selective"),
            ("tp2 cp2 dp2 / ep4", "gather", "selective"),
            ("cp2 tp2 pp2", "ring", "selective"),
            ("cp4 dp2 / ep8", "ulysses", "projections"),
            ("cp4 dp2 / ep8", "ulysses", "none"),
        )
    ),
    ("latent", "cp4 dp2 / ep8", "all_gather", "ulysses", "selective"),
    ("latent", "tp2 cp2 dp2 / ep4", "all_to_all", "gather", "selective"),
    ("direct", "tp2 cp2 pp2", "all_gather", "ring", "full"),
    # The mappings of Liu et al., "MoE Parallel Folding", 2025, tables 1, 3 and 5.
    ("mixtral", "tp2 dp8 pp8 / ep8", "all_to_all", "gather", "none"),
    ("mixtral", "tp2 dp8 pp8 / ep4 etp2", "all_to_all", "gather", "none"),
    ("mixtral", "tp2 cp4 dp2 pp8 / ep8", "all_to_all", "gather", "selective"),
    ("g8t8", "tp4 dp4 pp8 / ep8", "all_gather", "gather", "none"),
    ("g8t8", "tp8 dp16 / ep8", "all_gather", "gather", "full"),
    ("llama", "tp8 dp2 pp16 / ep8", "all_to_all", "gather", "none"),
    ("qwen2", "tp2 dp8 pp4 / ep4", "all_gather", "gather", "selective"),
]
QUICK = [("toy", "tp2 dp4 / ep2 etp2", "ragged", "gather", "none")]


def senders(schedule):
    """The stages that send in each permute, and the ticks of which parity it runs in."""
    return [
        (parity, {sender for sender, _ in pairs})
        for parity in (0, 1)
        for pairs in schedule.messages(parity)
        if pairs
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "dispatch", "context", "remat"), full_but(CASES, *QUICK)
)
def test_layer_volumes_equal_traced_program(name, layout, dispatch, context, remat):
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "dispatch", "remat", "chunks"), FP8_CASES)
def test_layer_volumes_in_fp8_and_chunks_equal_traced_program(
    name, layout, dispatch, remat, chunks
):
    execution = Execution(
        dispatch=dispatch,
        context="gather",
        remat=remat,
        activation_wire="float8_e4m3fn",
        expert_chunks=chunks,
    )
    check_layer(name, layout, execution)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all", "ragged"])
def test_layer_volumes_in_chunks_equal_traced_program(dispatch):
    """Twenty-four tokens in five chunks, with a capacity that some of them do not reach."""
    execution = Execution(dispatch=dispatch, context="gather", expert_chunks=5)
    check_layer("full", "dp4 / ep4", execution)


SERVERS = [
    # Eight servers of eight, and with capacities and without.
    ("g8t8", "dp64 / ep64", 8, {}),
    ("large", "dp64 / ep64", 8, {"remat": "selective"}),
    ("qwen2", "tp4 dp16 / ep32 etp2", 8, {"remat": "full"}),
    ("toy", "tp2 cp2 dp4 / ep8 etp2", 8, {"remat": "none"}),
    ("full", "dp8 / ep8", 4, {"expert_chunks": 3}),
    ("half", "tp2 dp4 / ep8", 2, {"two_batch_overlap": True, "remat": "selective"}),
    ("long", "dp4 / ep4", 2, {"activation_wire": "float8_e4m3fn"}),
    ("toy", "pp2 dp4 / ep4", 2, {"remat": "full"}),
    ("g8t8", "dp64 / ep64", 8, {"dispatch": "two_level_ragged"}),
    ("toy", "tp2 cp2 dp4 / ep8 etp2", 8, {"dispatch": "two_level_ragged", "remat": "selective"}),
    (
        *("long", "dp4 / ep4", 2),
        {"dispatch": "two_level_ragged", "activation_wire": "float8_e4m3fn"},
    ),
    # One device of each server, and one server.
    ("toy", "tp2 dp4 / ep4 etp2", 2, {}),
    ("toy", "dp8 / ep8", 8, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "server_devices", "execution"), SERVERS)
def test_layer_volumes_with_two_levels_equal_traced_program(
    name, layout, server_devices, execution
):
    options = {"context": "gather", "dispatch": "two_level", **execution}
    check_layer(name, layout, Execution(**options, server_devices=server_devices))


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
    ("toy", INTERLEAVED, {"dispatch": "all_gather", "remat": "full"}),
    ("dropless", "tp2 dp8 pp8 / ep8", {"dispatch": "all_to_all", "remat": "selective"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "execution"), HALVES)
def test_layer_volumes_with_two_batches_equal_traced_program(name, layout, execution):
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
        passes = repeat_transfers(passes, schedule_of(batch, sizes).ticks)
    assert found == stated(passes, sizes)
    assert found or sizes.tp * sizes.cp * sizes.ep * sizes.etp == 1


@pytest.mark.slow
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
def test_step_volumes_outside_layers_equal_traced_program(name, layout):
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
    passes += volumes.row_reordering(sized, sizes, batch, method)
    if sizes.pp > 1:
        schedule = schedule_of(batch, sizes)
        # A tick's program has the permutes of even and of odd ticks.
        hops = [volumes.hop(sized, tokens, method)] * len(senders(schedule))
        passes = repeat_transfers([*passes, *hops], schedule.ticks)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "dispatch", "overlap"),
    [
        ("toy", "tp2 dp4 / ep8", "all_to_all", {}),
        ("toy", "tp2 dp4 / ep4 etp2", "all_to_all", {}),
        ("toy", "tp2 cp2 dp2 / ep4", "all_gather", {}),
        ("toy", "tp2 cp2 dp4 / ep8 etp2", "all_gather", {}),
        ("shared", "tp2 dp4 / ep8", "all_to_all", {}),
        ("dense", "tp2 dp4", "all_gather", {}),
        ("toy", "tp2 dp4 / ep4 etp2", "all_to_all", {"expert_chunks": 3}),
        ("toy", "tp2 dp4 / ep8", "all_to_all", {"buffer_factor": 0.5}),
        ("toy", "tp2 cp2 dp2 / ep4", "all_gather", {"two_batch_overlap": True}),
        ("toy", "tp2 cp2 dp4 / ep8 etp2", "two_level", {"server_devices": 8}),
        ("full", "tp2 dp8 / ep16", "two_level", {"server_devices": 4}),
    ],
)
def test_layer_volumes_equal_compiled_program(name, layout, dispatch, overlap):
    execution = Execution(dispatch=dispatch, context="gather", **overlap)
    config, mesh = replace(CONFIGS[name], num_layers=1, execution=execution), mesh_of(layout)
    network = Model(config, mesh)
    by_row = PartitionSpec(mesh.dp)

    def local(weights, tokens, valid):
        x, stats = model.hidden(weights, tokens, valid, network)
        return x, jax.tree.map(jnp.atleast_1d, stats)

    forward = on_mesh(local, mesh, (specs(network), by_row, by_row), PartitionSpec(mesh.axes))
    batch = batch_of(config, mesh.layout)
    tokens = jnp.ones((batch.rows, batch.time), jnp.int32)
    compiled = forward.lower(random_weights(config, 0), tokens, tokens > 0).compile()
    found, expected = Counter(), Counter()
    for one in hlo_collectives(compiled.as_text()):
        found[one.kind, tuple(sorted(one.over))] += one.bytes
    sizes, tokens = (sizes_of(config), mesh.layout), batch.local_tokens(mesh.layout)
    transfers = [
        *volumes.embedding(*sizes, tokens, method_of(config))[:1],
        *volumes.layer(*sizes, batch, method_of(config))[0],
    ]
    back = volumes.row_reordering(*sizes, batch, method_of(config))
    transfers += [one for one in back if one.kind == "all_gather"]
    for one in transfers:
        expected[one.kind, device_groups(one, mesh)] += one.bytes
    assert found == expected


def device_groups(transfer, mesh):
    axes = [atom for axis in transfer.axes for atom in getattr(mesh, axis)]
    groups = axis_groups(mesh, axes)
    if transfer.server_devices is not None:
        _, indices = stated_group(transfer, mesh)
        groups = [[group[index] for index in part] for group in groups for part in indices]
    return tuple(sorted(map(tuple, groups)))
