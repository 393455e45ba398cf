"""Memory of a device: by hand, and against what the compiler of a program says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from programs import mesh_of
from whole_network import loss_and_gradient

from jrl.trainer.setup.memory import weight_bytes
from moe.config import Model, ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution
from moe.experts.dispatch import buffers
from moe.placement import in_chunks, specs
from moe.planner import volumes
from moe.planner.memory import (
    activation_bytes,
    chunks_in_flight,
    comm_buffer_bytes,
    expert_rows,
    first_chunks_in_flight,
    layers_in_flight,
    memory,
    model_states,
    received_tokens,
    saved_score_bytes,
    working_score_bytes,
)
from moe.planner.method import Batch, Method, for_weights, with_fields
from moe.planner.models import (
    PRESETS,
    parameters_on_device,
    sharded_parameters,
    sizes_of,
    weight_groups,
    weight_layout,
)
from moe.planner.volumes import balanced_tokens_per_peer, tokens_per_peer
from moe.weights import shapes
from sharding.folding import Layout, fold_abstract
from sharding.schedule import Schedule

CONFIG = ModelConfig(
    vocab_size=512,
    num_layers=4,
    d_model=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    num_experts=16,
    experts_per_token=3,
    d_expert=96,
)
MIXTRAL = PRESETS["mixtral-8x22b"]


@pytest.mark.parametrize(
    ("layout", "num_layers"),
    [
        ("dp1", 4),
        ("tp2 dp2 / ep4", 4),
        ("tp2 cp2 dp2 / ep4 etp2", 4),
        ("pp2 dp4 / ep2", 4),
        ("pp2 vpp2 tp2 / ep2", 4),
        # Chunks that differ by a layer.
        ("pp2 dp4 / ep2", 5),
        ("pp2 vpp2 tp2 / ep2", 6),
    ],
)
def test_weights_and_their_parts_are_those_of_the_placement(layout, num_layers):
    sizes, config = Layout.parse(layout), replace(CONFIG, num_layers=num_layers)
    mesh, model = fold_abstract(sizes), sizes_of(config)
    network = Model(config, mesh)
    assert 4 * parameters_on_device(model, sizes) == weight_bytes(network)
    assert 4 * sharded_parameters(model, sizes) == weight_bytes(network, shards=True)


@pytest.mark.parametrize(("storage", "copies"), [("float32", (4, 8)), ("bfloat16", (4, 6))])
def test_several_micro_batches_need_a_gradient_of_one_beside_their_sum(storage, copies):
    layout, method = Layout.parse("tp2 dp2 pp2 / ep4"), Method(storage=storage)
    of = weight_groups(MIXTRAL, layout)
    for rows, of_float32, of_gradient in zip((2, 4), (4, 8), copies, strict=True):
        found = memory(MIXTRAL, layout, Batch(rows, 4096), method)
        # Norms and routers are float32 among the others, and so are their gradients.
        each = [one.parameters * (of_float32 if one.is_precise else of_gradient) for one in of]
        assert found.gradients == sum(each)


@pytest.mark.parametrize(("storage", "each"), [("float32", 4), ("bfloat16", 2), ("mixed", 4)])
def test_the_gradient_of_a_single_micro_batch_keeps_its_dtype(storage, each):
    """As in programs for absent GPUs: benchmarks/results/absent.md, Qwen3-235B-A22B."""
    layout = Layout.parse("tp2 dp4 / ep8")
    found = memory(MIXTRAL, layout, Batch(4, 4096), Method(storage=storage)).gradients
    groups = weight_groups(MIXTRAL, layout)
    assert found == sum(one.parameters * (4 if one.is_precise else each) for one in groups)


def test_a_pipeline_adds_up_the_gradient_of_a_chunk():
    whole, chunks = (
        memory(MIXTRAL, Layout.parse(layout), Batch(8, 512), Method(storage="bfloat16")).gradients
        for layout in ("pp4", "pp4 vpp7")
    )
    groups = weight_groups(MIXTRAL, Layout.parse("pp4"))
    added = sum(one.parameters * (4 if one.is_precise else 2) for one in groups if one.in_layers)
    assert whole - chunks == pytest.approx(added * 6 / 7)


def test_states_are_18_bytes_of_which_12_are_cut():
    layout = Layout.parse("tp2 dp8 pp8 / ep8")
    found = memory(MIXTRAL, layout, Batch(256, 4096), Method(storage="mixed"))
    model_states = sum(
        one.parameters * (6 + 12 / one.group(layout)) for one in weight_groups(MIXTRAL, layout)
    )
    assert found.weights + found.gradients + found.optimizer == pytest.approx(model_states)


def test_full_sharding_keeps_parts_of_layers():
    layout, batch = Layout.parse("tp2 dp64 / ep8"), Batch(256, 4096)
    method = Method(Execution(remat="full"), storage="mixed")
    whole = memory(MIXTRAL, layout, batch, method)
    parts = memory(MIXTRAL, layout, batch, with_fields(method, fsdp=True))
    assert parts.weights == 2 * sharded_parameters(MIXTRAL, layout)
    assert parts.gradients < whole.gradients / 8
    # A layer and the ends are joined while they are at work.
    assert parts.buffers > whole.buffers
    assert parts.total < whole.total / 3


def test_a_first_moment_in_bfloat16_is_two_bytes_less():
    layout, batch = Layout.parse("tp2 dp8 pp8 / ep8"), Batch(256, 4096)
    plain, half = (
        memory(MIXTRAL, layout, batch, Method(storage="bfloat16", mu_dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    assert plain.optimizer - half.optimizer == 2 * sharded_parameters(MIXTRAL, layout)


def test_memory_of_wires_and_chunks():
    layout, batch = Layout.parse("tp2 dp64 / ep8"), Batch(128, 4096)
    method = Method(Execution(remat="full"), even=True)
    plain = memory(MIXTRAL, layout, batch, method)
    # The tokens that come are kept as they came: a byte an element and a scale.
    wired = memory(MIXTRAL, layout, batch, with_fields(method, activation_wire="float8_e4m3fn"))
    arrived = MIXTRAL.num_layers * received_tokens(MIXTRAL, layout, 2048, method)
    assert plain.activations - wired.activations == arrived * (MIXTRAL.d_model - 4)
    # Gradients of a layer's experts, of three chunks more.
    chunked = memory(MIXTRAL, layout, batch, with_fields(method, expert_chunks=4))
    assert chunked.buffers - plain.buffers == 3 * 4 * MIXTRAL.expert_parameters / 8
    # Two rows in halves: three of four gradients of the experts, and one of all other weights of a
    # layer, but what is kept and at work is as much.
    pairs = replace(batch, micro_rows=2)
    both = with_fields(method, expert_chunks=2, two_batch_overlap=True)
    at_once, halved = (memory(MIXTRAL, layout, pairs, one) for one in (method, both))
    of_layer = [one.parameters // 56 for one in weight_groups(MIXTRAL, layout) if one.in_layers]
    more = sum(of_layer) + 2 * MIXTRAL.expert_parameters / 8
    assert halved.buffers - at_once.buffers == 4 * more
    assert halved.activations == at_once.activations
    # Half of it is sent, half received: gate and up of all layers, more than the embedding.
    sent = comm_buffer_bytes(MIXTRAL, layout, replace(method, gradient_wire="bfloat16"))
    experts = MIXTRAL.num_layers * MIXTRAL.expert_parameters / 8
    assert sent == pytest.approx(4 * experts * 2 / 3)
    assert comm_buffer_bytes(MIXTRAL, layout, method) == 0


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2 vpp2", "pp5 vpp3", "pp4 vpp7"])
def test_a_pipeline_keeps_as_many_chunks_as_its_schedule_has_places_for(layout):
    sizes = Layout.parse(layout)
    for number in range(1, 3 * sizes.pp):
        schedule = Schedule(sizes.pp, number, sizes.vpp)
        for chunks, on_way in (
            (None, chunks_in_flight(sizes, number)),
            ([0], first_chunks_in_flight(sizes, number)),
        ):
            assert on_way == 1 + max(map(max, schedule.slots(chunks))), (number, chunks)


def test_pipeline_memory_equals_chunks_in_flight():
    for layout, model, number, layers in (
        ("pp4", MIXTRAL, 16, 4 * 14),
        ("pp4", MIXTRAL, 3, 3 * 14),
        ("pp4 vpp7", MIXTRAL, 16, (4 * 7 + 3) * 2),
        # The deepest chunks have two of 25 layers.
        ("pp4 vpp4", replace(MIXTRAL, num_layers=25), 16, (4 * 4 + 3) * 2),
        # The first chunk brings the dense layers of eight micro-batches.
        ("pp4 vpp7", replace(MIXTRAL, num_dense_layers=1, num_layers=57), 16, (4 * 7 + 3) * 2 + 8),
    ):
        sizes, method = Layout.parse(layout), Method(Execution(remat="selective"))
        assert layers_in_flight(model, sizes, number) == layers
        batch = Batch(number * 4, 512, micro_rows=4)
        layer = activation_bytes(model, sizes, batch.local_tokens(sizes), method, "selective")
        assert memory(model, sizes, batch, method).activations == layers * layer


@pytest.mark.parametrize("capacity", [None, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("layout", ["dp8 / ep8", "tp2 dp4 / ep4 etp2", "dp2"])
def test_buffers_are_as_large_as_the_dispatchers(layout, capacity):
    config, sizes = replace(CONFIG, capacity_factor=capacity), Layout.parse(layout)
    model, tokens, mesh = sizes_of(config), 40, fold_abstract(sizes)
    taken = None
    if capacity is not None:
        taken = min(tokens, -(-round(capacity * 10 * tokens * 3) // (16 * 10)))
    given = tokens, 3, 16 // sizes.ep, mesh, taken
    assert tokens_per_peer(model, sizes, tokens) == buffers.peer_tokens(*given)
    assert expert_rows(model, sizes, tokens, Method()) == buffers.buffer_rows(*given)
    if capacity is None:
        even = expert_rows(model, sizes, 64, Method(even=True))
        assert even == buffers.buffer_rows(64, 3, 16 // sizes.ep, mesh, None, buffer_factor=1.0)
        for factor in (0.8, 1.5, 9.0):
            given = 64, 3, 16 // sizes.ep, mesh, None, factor
            expected = buffers.peer_tokens(*given)
            method = Method(Execution(dispatch="all_to_all", buffer_factor=factor), even=True)
            assert balanced_tokens_per_peer(model, sizes, 64, method) == expected
            num_sharing = sizes.ep * sizes.etp
            if num_sharing > 1:
                assert expert_rows(model, sizes, 64, method) == buffers.buffer_rows(*given)
                assert received_tokens(model, sizes, 64, method) == num_sharing * expected


def compiled_bytes(layout, rows, time, model=CONFIG, **execution):
    """Arguments, results and what lies between, compiled as users do, with equal layers scanned:
    elsewhere the CPU compiler computes nothing twice, whatever it is told."""
    options = {"dispatch": "all_gather", "context": "gather", **execution}
    execution = Execution(scan_layers=True, vocab_chunk=None, **options)
    config, mesh = replace(model, execution=execution), mesh_of(layout)

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.mesh, spec))

    weights = jax.tree.map(
        lambda leaf, spec: abstract(leaf.shape, leaf.dtype, spec),
        jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config)),
        specs(Model(config, mesh)),
    )
    piece = tuple(
        abstract((rows, time), dtype, PartitionSpec(mesh.dp)) for dtype in (jnp.int32, jnp.bool_)
    )
    compiled = jax.jit(loss_and_gradient(config, mesh)).lower(weights, piece).compile()
    found = compiled.memory_analysis()
    assert found is not None
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


LATENT = replace(CONFIG, num_kv_heads=8, mla=MultiHeadLatentAttention(32, 48, 8, 12))
TWO_LEVEL = {"dispatch": "two_level", "server_devices": 4}
PLAIN = {"attention": "plain"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "remat", "changes"),
    [
        # Of `tests/support/parity.py`, each of the three with and without stages and with parts of
        # experts.
        (CONFIG, "tp2 cp2 dp2", "none", {}),
        (CONFIG, "cp2 / etp2", "full", {}),
        (CONFIG, "tp2 cp2 dp4 / ep8 etp2", "selective", {}),
        (CONFIG, "tp2 dp2 / ep4", "projections", {}),
        (CONFIG, "pp2 vpp2 dp2 cp2 tp2 / ep8", "none", {}),
        (CONFIG, "pp2 vpp2 dp2 / ep2", "selective", {}),
        (CONFIG, "pp2 tp2 dp2 / ep4", "full", {}),
        *((CONFIG, "dp8 / ep8", remat, TWO_LEVEL) for remat in ("none", "selective", "full")),
        *((LATENT, "tp2 dp2 / ep4", remat, {}) for remat in ("none", "selective", "full")),
        (replace(CONFIG, query_key_norm="head"), "tp2 dp2 / ep4", "selective", {}),
        # One row on a device that keeps everything: scores of 1,024 tokens are two fifths of it.
        (CONFIG, "dp1", "none", {"rows": 1, "time": 1024}),
        (CONFIG, "dp1", "none", {"rows": 1, **PLAIN}),
    ],
)
def test_memory_equals_compiled_program(model, layout, remat, changes):
    sizes, options = Layout.parse(layout), {"remat": remat, "attention": "blocked", **changes}
    rows, time = options.pop("rows", 2), options.pop("time", 512)
    # Through a pipeline go two micro-batches.
    batch = Batch((2 if sizes.pp > 1 else 1) * rows * sizes.dp, time, micro_rows=rows)
    total = compiled_bytes(layout, batch.rows, batch.time, model, **options)
    execution = Execution(vocab_chunk=None, **options)
    method = Method(execution, itemsize=4, duplicates_experts=True)
    stated = memory(sizes_of(model), sizes, batch, method)
    assert stated.total - stated.optimizer == pytest.approx(total, rel=0.15)


def test_scores_of_a_device_by_hand():
    layout, batch = Layout.parse("tp2 cp2 dp2"), Batch(4, 1024, micro_rows=2)
    model = replace(MIXTRAL, num_heads=6)
    # Three heads, two rows, half of the queries, all keys.
    every = 4 * 3 * 2 * 512 * 1024

    def found(**settings):
        method = Method(Execution(**settings))
        saved = saved_score_bytes(model, layout, batch, method, method.execution.remat)
        return [saved, working_score_bytes(model, layout, batch, method)]

    assert found(attention="plain") == [2 * every, 3 * every]
    assert found(attention="plain", context="ring") == [every, 3 * every / 2]
    assert found(attention="plain", remat="full") == [0, 3 * every]
    # Of a row eight blocks of 128 queries, with an eighth of the keys and so on to all of them.
    assert found(attention="blocked", context="ulysses") == [0, 3 * every / 2 * 4.5 / 8]
    # Two of eight blocks, each with all keys.
    assert found(attention="blocked") == [0, 3 * every / 2 * 2 / 8]
    assert found() == [0, 0]
    # They and the copies of experts are all that these settings change.
    of_all = [memory(model, layout, batch, one).total for one in MEMORIES]
    kept_by = MIXTRAL.num_layers * (2 * every + 4 * MIXTRAL.expert_parameters)
    assert of_all[1] - of_all[0] == pytest.approx(kept_by + 3 * every)
    # If a stage's chunk is a layer by itself they stand in place of gradients.
    alone, batch = replace(model, num_layers=4), Batch(8, 1024, micro_rows=2)
    stages = Layout.parse("pp2 vpp2 tp2 cp2 dp2")
    for several in (1, 8):
        longer = replace(batch, time=several * 1024)
        values = activation_bytes(alone, stages, longer.local_tokens(stages), Method(), "none")
        more = max(3 * every * several**2 - values, 0)
        of_all = [memory(alone, stages, longer, one).buffers for one in MEMORIES]
        assert of_all[1] - of_all[0] == pytest.approx(more) and (more > 0) is (several > 1)


MEMORIES = Method(), Method(Execution(attention="plain"), duplicates_experts=True)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "mixed-bfloat16-wire"])
def test_states_are_those_of_one_chunk_where_stages_are_as_deep(storage):
    """56 layers on eight stages are seven with one chunk and with seven, and eight with two."""
    given = Method(reshards=True, storage=storage, gradient_wire="bfloat16", mu_dtype="bfloat16")
    for chunks, is_alike in ((1, True), (2, False), (7, True)):
        layout = Layout(tp=2, cp=2, dp=4, pp=8, vpp=chunks, ep=4)
        alone = replace(layout, vpp=1)
        assert weight_layout(MIXTRAL, layout) == (alone if is_alike else layout)
        of_both = [model_states(MIXTRAL, one, given, True) for one in (layout, alone)]
        assert (of_both[0] == of_both[1]) is is_alike
        sent = [volumes.unsharding(MIXTRAL, one, given) for one in (layout, alone)]
        assert (sent[0] == sent[1]) is is_alike


def test_weights_depend_on_nothing_that_layers_do():
    layout, plain = Layout(tp=2, cp=2, dp=4, ep=4), Method(reshards=True, storage="bfloat16")
    found = model_states(MIXTRAL, layout, plain, True)
    sent = volumes.gradients(MIXTRAL, layout, plain), volumes.unsharding(MIXTRAL, layout, plain)
    choices = {
        "dispatch": ("all_gather", "all_to_all", "ragged", "two_level", "deepep"),
        "context": ("gather", "ring", "ulysses"),
        "remat": ("none", "selective", "projections", "full"),
        "activation_wire": ("float8_e4m3fn",),
        "attention": ("plain", "blocked"),
    }
    for name, values in choices.items():
        for value in values:
            other = with_fields(plain, **{name: value})
            assert for_weights(other) == plain
            assert model_states(MIXTRAL, layout, other, True) == found
            assert volumes.gradients(MIXTRAL, layout, other) == sent[0]
            assert volumes.unsharding(MIXTRAL, layout, other) == sent[1]
