"""The time of a step, on sizes where each part of it can be had by hand."""

from dataclasses import replace

import pytest

from sharding.folding import Layout
from sharding.planner import volumes
from sharding.planner.cost import System, cost
from sharding.planner.hardware import HARDWARE
from sharding.planner.method import Batch, Method
from sharding.planner.models.presets import PRESETS
from sharding.planner.validation import published
from sharding.schedule import Schedule

MIXTRAL = PRESETS["mixtral-8x22b"]
H100 = replace(HARDWARE["h100"], latency_inside=0.0, latency_outside=0.0)
MEGATRON = Method(dispatch="ragged", storage="mixed", even=True, resends=False)


def of(layout, method=MEGATRON, system=None, rows=256, **changes):
    hardware = replace(H100, **changes)
    given = Batch(rows, 4096), method, hardware, system or System()
    return cost(MIXTRAL, Layout.parse(layout), *given)


def test_products_are_the_arithmetic_over_the_rate():
    found = of("tp2 dp64 / ep8")
    flops = 256 * 4096 * MIXTRAL.training_flops(4096) / 128
    assert found.flops == pytest.approx(flops)
    assert found.products == pytest.approx(flops / (0.6 * H100.peak))


def test_full_rematerialisation_goes_forward_again():
    assert of("tp2 dp64 / ep8", replace(MEGATRON, remat="full")).products == pytest.approx(
        # The head is not computed again.
        of("tp2 dp64 / ep8").products * 4 / 3,
        rel=3e-3,
    )


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


def test_experts_inside_a_server_take_what_the_paper_counts():
    layout = Layout.parse("tp2 dp8 pp8 / ep8")
    tokens = 2048
    sent, _ = volumes.dispatch(MIXTRAL, layout, tokens, MEGATRON)
    rows = [one for one in sent if one.what in ("tokens to experts", "sums of experts")]
    counted = published.expert_exchange(tokens, 2, 6144, 8)
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
    chunked = replace(MEGATRON, expert_chunks=4)
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


def test_half_the_wire_is_half_the_time():
    """FP8 tokens of bfloat16 ones, and bfloat16 gradients of float32 ones across groups."""
    narrow = of("tp2 dp64 / ep8", replace(MEGATRON, activation_wire="float8_e4m3fn"))
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
    layout = "tp2 dp8 pp8 vpp7 / ep8"
    bare, hidden = of(layout), of(layout, system=System(hides_gradients=True))
    assert hidden.communication["gradients"] == pytest.approx(bare.communication["gradients"] / 7)
    assert hidden.communication["new weights"] == bare.communication["new weights"]


def test_micro_batches_divide_the_rows():
    with pytest.raises(ValueError, match="rows=255 do not divide over dp=8"):
        of("tp2 dp8 pp8 / ep8", rows=255)
