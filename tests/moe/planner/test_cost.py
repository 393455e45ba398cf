"""The time of a step, on sizes that can be calculated by hand."""

from dataclasses import replace

import pytest

from moe.execution import Execution
from moe.planner import volumes
from moe.planner.communication import STREAM_GROUPS
from moe.planner.cost import System, cost
from moe.planner.memory import activation_bytes
from moe.planner.method import Batch, Method, with_fields
from moe.planner.models import PRESETS
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout
from sharding.schedule import Schedule
from tests.oracles import parallelism

MIXTRAL = PRESETS["mixtral-8x22b"]
H100 = replace(HARDWARE["h100"], latency_inside=0.0, latency_outside=0.0)
MEGATRON = Method(Execution(dispatch="ragged"), storage="mixed", even=True, resends=False)


def of(layout, method=MEGATRON, system=None, rows=256, micro_rows=1, **changes):
    hardware = replace(H100, **changes)
    given = Batch(rows, 4096, micro_rows), method, hardware, system or System()
    return cost(MIXTRAL, Layout.parse(layout), *given)


def test_products_are_the_arithmetic_over_the_rate():
    found = of("tp2 dp64 / ep8")
    flops = 256 * 4096 * MIXTRAL.training_flops(4096) / 128
    assert found.flops == pytest.approx(flops)
    assert found.products == pytest.approx(flops / (0.6 * H100.peak))


def test_full_rematerialisation_goes_forward_again():
    assert of("tp2 dp64 / ep8", with_fields(MEGATRON, remat="full")).products == pytest.approx(
        # The head is not computed again.
        of("tp2 dp64 / ep8").products * 4 / 3,
        rel=3e-3,
    )


def test_projections_are_made_again():
    again = of("tp2 dp64 / ep8", with_fields(MEGATRON, remat="projections")).products
    # Of four passes' products, one more of queries, keys and values.
    width = MIXTRAL.queries + 2 * MIXTRAL.keys
    flops = 2.0 * 256 * 4096 * MIXTRAL.d_model * width * MIXTRAL.num_layers / 128
    assert again - of("tp2 dp64 / ep8").products == pytest.approx(flops / (0.6 * H100.peak))


def test_few_tokens_wait_for_weights():
    slow = of("tp2 dp64 / ep8", memory_bandwidth=H100.memory_bandwidth / 100)
    assert slow.products > 2 * of("tp2 dp64 / ep8").products


def test_the_bubble_is_that_of_the_schedule():
    for layout in ("dp16 pp8 / ep8", "dp16 pp8 vpp7 / ep8"):
        found, sizes = of(layout), Layout.parse(layout)
        once = found.communication["gradients"] + found.communication["new weights"]
        idle = Schedule(sizes.pp, 256 // sizes.dp, sizes.vpp).bubble
        working = found.total - found.bubble - once
        # The optimizer's own traffic is no work of a micro-batch: below a hundredth.
        assert found.bubble == pytest.approx(idle * working, rel=2e-2)


def test_dispatch_inside_a_server_takes_the_papers_seconds():
    layout = Layout.parse("tp2 dp8 pp8 / ep8")
    tokens = 2048
    sent, _ = volumes.dispatch(MIXTRAL, layout, tokens, MEGATRON)
    rows = [one for one in sent if one.what in ("tokens to experts", "sums of experts")]
    counted = parallelism.expert_exchange(tokens, 2, 6144, 8)
    assert sum(one.sent(layout) for one in rows) == pytest.approx(2 * counted)


def test_hidden_communication_shows_where_products_are_short():
    shown = of("tp2 dp64 / ep8")
    assert shown.communication["experts"] > 0
    hidden = of("tp2 dp64 / ep8", system=System(hidden=1.0))
    assert hidden.communication["experts"] == 0
    starved = of("tp2 dp64 / ep8", system=System(hidden=1.0), inside=H100.inside / 100)
    assert starved.communication["experts"] > 0


def test_chunks_travel_beside_products():
    """A quarter of what goes to experts shows where products last; weights are read four times."""
    layout, system = "tp2 dp64 / ep8", System(hides_chunks=True)
    chunked = with_fields(MEGATRON, expert_chunks=4)
    at_once, beside = of(layout, system=system), of(layout, chunked, system)
    # Each chunk has a few offsets of its own.
    experts = at_once.communication["experts"]
    assert beside.communication["experts"] == pytest.approx(experts / 4, rel=1e-5)
    assert of(layout, chunked).communication["experts"] == pytest.approx(experts, rel=1e-5)
    starved = {"inside": H100.inside / 100}
    shown = of(layout, chunked, system, **starved).communication["experts"]
    assert shown > of(layout, system=system, **starved).communication["experts"] / 2
    slow = {"memory_bandwidth": H100.memory_bandwidth / 100}
    assert of(layout, chunked, **slow).products > 1.5 * of(layout, **slow).products


def test_halves_of_the_rows_send_beside_products_of_each_other():
    """A quarter shows where products last, in four chunks a quarter of the experts' part of that;
    and what products do not last for."""
    layout, system = "tp2 dp64 / ep8", System(hides_two_batch=True, hides_chunks=True)
    halved = with_fields(MEGATRON, two_batch_overlap=True)

    def in_pairs(method, system=system, **changes):
        return of(layout, method, system, micro_rows=2, **changes).communication

    whole, halves = in_pairs(MEGATRON), in_pairs(halved)
    ends = ("vocabulary", "new weights", "gradients")
    assert {what: halves[what] for what in ends} == {what: whole[what] for what in ends}
    # Each half has offsets of its own for the experts.
    within = {what: time for what, time in whole.items() if what in STREAM_GROUPS}
    assert len(within) == 2
    for what, time in within.items():
        assert halves[what] == pytest.approx(time / 4, rel=1e-5)
    # The last states are gathered over tp once more, and their gradients scattered.
    assert set(halves) - set(whole) == {"row order"}
    sizes, batch = Layout.parse(layout), Batch(256, 4096, 2)
    sent = volumes.row_reordering(MIXTRAL, sizes, batch, halved)
    expected = 2 * sum(one.seconds(sizes, H100) for one in sent)
    assert halves["row order"] == pytest.approx(expected)
    in_chunks = in_pairs(with_fields(halved, expert_chunks=4))
    shown = sum(in_chunks[what] for what in within)
    expected = within["attention and dense layers over tp"] + within["experts"] / 4
    assert shown == pytest.approx(expected / 4, rel=1e-4)
    # Nothing is beside a single row, and nothing where the system does one after the other.
    assert of(layout, halved, system) == of(layout, MEGATRON, system)
    alone = in_pairs(halved, System())
    assert alone["experts"] == pytest.approx(within["experts"], rel=1e-5)
    # Three quarters of the layers' products, which take their arithmetic here.
    slow = {"inside": H100.inside / 100}
    bare, beside = (in_pairs(method, **slow) for method in (MEGATRON, halved))
    hidden = sum(bare[what] - beside[what] for what in within)
    head = 6 * 2 * 2048 * MIXTRAL.d_model * MIXTRAL.vocab_size / (0.6 * H100.peak)
    products = of(layout, MEGATRON, micro_rows=2).products - 2 * head
    assert hidden == pytest.approx(3 / 4 * products, rel=1e-3)


def test_each_half_reads_the_weights():
    slow, halved = H100.memory_bandwidth / 100, with_fields(MEGATRON, two_batch_overlap=True)
    whole, halves = (
        of("tp2 dp64 / ep8", method, micro_rows=2, memory_bandwidth=slow).products
        for method in (MEGATRON, halved)
    )
    # But not the head's, nor attention's scores.
    assert 1.8 * whole < halves < 2 * whole


def test_half_the_wire_is_half_the_time():
    """FP8 tokens of bfloat16 ones, and bfloat16 gradients of float32 ones across groups."""
    narrow = of("tp2 dp64 / ep8", with_fields(MEGATRON, activation_wire="float8_e4m3fn"))
    experts = narrow.communication["experts"] / of("tp2 dp64 / ep8").communication["experts"]
    # And scales, a thirty-second backward; ids and probs are as they were.
    assert 0.5 < experts < 0.52
    plain, compressed = (
        of("tp2 dp64 / ep8", replace(MEGATRON, gradient_wire=wire), domain=1)
        for wire in ("float32", "bfloat16")
    )
    assert compressed.communication["gradients"] < 0.6 * plain.communication["gradients"]
    assert compressed.communication["new weights"] == plain.communication["new weights"]


def test_gradients_hide_under_the_last_micro_batches():
    layout, system = (
        "tp2 dp8 pp8 vpp7 / ep8",
        System(hides_gradients=True, hides_embed_and_head=True),
    )
    on_the_way = with_fields(MEGATRON, overlap_grad_reduce=True)
    bare, hidden = of(layout), of(layout, on_the_way, system)
    assert of(layout, system=system).communication == bare.communication
    # Each layer's by themselves, which takes no longer where links have no latency.
    assert hidden.communication["gradients"] == pytest.approx(bare.communication["gradients"] / 7)
    assert hidden.communication["new weights"] == bare.communication["new weights"]


@pytest.mark.parametrize("micro_rows", [1, 8])
def test_gradients_of_the_ends_hide_nowhere_by_themselves(micro_rows):
    """With no pipeline one of 56 layers shows, embedding and head, and what is longer than two
    thirds of a micro-batch: much of it for one row, nothing for eight."""
    layout, system = Layout.parse("tp2 dp64 / ep8"), System(hides_gradients=True)
    on_the_way = with_fields(MEGATRON, overlap_grad_reduce=True)
    bare, hidden = (
        of(str(layout), method, system, rows=512, micro_rows=micro_rows)
        for method in (MEGATRON, on_the_way)
    )
    ends = sum(
        one.seconds(layout, H100)
        for one in volumes.gradients(MIXTRAL, layout, MEGATRON)
        if one.what in ("gradients: embedding and head", "gradients: last norm")
    )
    layers = bare.communication["gradients"] - ends
    once, work = {"gradients", "new weights"}, bare.products + bare.traffic
    work += sum(time for what, time in bare.communication.items() if what not in once)
    # The optimizer's traffic is no work of a micro-batch, and below a hundredth.
    left = layers - work / (8 / micro_rows) * 2 / 3 * 55 / 56
    assert hidden.communication["gradients"] == pytest.approx(
        ends + max(layers / 56, left), rel=0.05 if micro_rows == 1 else 1e-6
    )
    assert (left > layers / 56) == (micro_rows == 1)


def test_micro_batches_divide_the_rows():
    with pytest.raises(ValueError, match="rows=255 cannot be split over dp=8"):
        of("tp2 dp8 pp8 / ep8", rows=255)


def test_experts_of_a_device_are_launched_one_by_one():
    layout, launch = "tp2 dp64 / ep4", 1e-3
    plain, launched = (of(layout, system=System(launch=each)) for each in (0.0, launch))
    # The second of two experts, in three passes of four micro-batches through 56 layers.
    assert launched.products - plain.products == pytest.approx(4 * 3 * 56 * launch)
    again = with_fields(MEGATRON, remat="full")
    plain, launched = (of(layout, again, System(launch=each)) for each in (0.0, launch))
    assert launched.products - plain.products == pytest.approx(4 * 4 * 56 * launch)
    # One expert is launched as a dense layer is.
    assert of("tp2 dp64 / ep8", system=System(launch=1.0)) == of("tp2 dp64 / ep8")


def test_a_stage_with_fewer_layers_has_the_head():
    """Of 56 layers in 16 stages four are on a stage, and the last has none left: 60 fill them."""
    full, spare = (of("tp2 dp4 pp16", system=System(fills_stages=each)) for each in (False, True))
    head = 3 * 2.0 * 64 * 2048 * MIXTRAL.d_model * MIXTRAL.vocab_size / (0.6 * H100.peak)
    assert full.products - spare.products == pytest.approx(head)
    even = "tp2 dp8 pp8"
    assert of(even, system=System(fills_stages=True)) == of(even)


def test_shards_wait_or_hide():
    method = replace(MEGATRON, reshards=True)
    hidden, waited = (
        of("tp2 dp64 / ep8", method, System(hides_shards=each), outside=5e12)
        for each in (True, False)
    )
    what = "shards of layers"
    assert hidden.communication[what] == 0 < waited.communication[what]


def test_full_rematerialisation_of_others_sends_again():
    layout = Layout.parse("tp2 dp64 / ep8")
    batch = Batch(256, 4096)
    for resends, passes in ((False, 3), (True, 2)):
        method = with_fields(MEGATRON, remat="full", resends=resends)
        forward, backward = volumes.layer(MIXTRAL, layout, batch, method)
        of_tokens = [each for each in forward if each.what == "tokens to experts"]
        again = [each for each in backward if each.what in ("tokens to experts", "sums of experts")]
        assert len(of_tokens) == 1
        assert len(again) == 2 * (passes - 2)
        kept = activation_bytes(MIXTRAL, layout, 2048, method, "full")
        assert (kept == 2 * 2048 * MIXTRAL.d_model) == (not resends)


def test_an_all_to_all_beside_another_micro_batch_takes_part_of_the_device():
    method = with_fields(MEGATRON, dispatch="deepep")
    shown, hidden = (
        of("tp2 dp64 / ep8", method, System(hides_experts=each)) for each in (False, True)
    )
    # Of one of four micro-batches, without the head.
    sent = shown.communication["experts"] / 4
    products = shown.products / 4 - 3 * 2.0 * 2048 * 6144 * 32768 / (0.6 * H100.peak)
    slower = products * (132 / 112 - 1)
    assert hidden.communication["experts"] / 4 == pytest.approx(slower + sent / 4)
    # DeepEP sends no more than all copies.
    assert shown.communication["experts"] < of("tp2 dp64 / ep8").communication["experts"]


def test_experts_alone_are_repeated():
    method = replace(MEGATRON, repeats_experts=True)
    system = System(launch=1e-3)
    plain, again = (of("tp2 dp64 / ep4", each, system) for each in (MEGATRON, method))
    flops = 2.0 * 256 * 4096 * 3 * 6144 * 2 * 16384 * 56 / 128
    # One pass of four micro-batches, with the launch of a second expert in each layer.
    more = flops / (0.6 * H100.peak) + 4 * 56 * 1e-3
    assert again.products - plain.products == pytest.approx(more)
    # Two directions forward and backward, and two again.
    ratio = again.communication["experts"] / plain.communication["experts"]
    assert ratio == pytest.approx(1.5, rel=0.01)
    sizes = Layout.parse("tp2 dp64 / ep4")
    kept = [
        activation_bytes(MIXTRAL, sizes, 2048, each, "none")
        for each in (replace(MEGATRON, repeats_experts=each) for each in (False, True))
    ]
    # Two rows of each token: gate, up, their product and the token itself.
    assert kept[0] - kept[1] == 2 * 2048 * 2 * (3 * 16384 + 6144)
