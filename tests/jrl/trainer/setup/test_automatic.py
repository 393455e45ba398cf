"""The layout that the planner chooses for a run."""

import re
from dataclasses import replace

import jax
import pytest

from jrl.config.run import RunConfig
from jrl.recipes import Grpo
from jrl.trainer.setup import planner
from jrl.trainer.setup.memory import run_memory
from jrl.trainer.setup.planner import (
    choose_layout,
    make_candidate,
    with_layout,
)
from jrl.trainer.setup.setup import build_setup
from moe.planner.search import layouts
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout

LAPTOP = HARDWARE["laptop"]


@pytest.fixture(scope="module")
def setup():
    return build_setup(RunConfig(), Grpo().divided(1))


def on_hardware(monkeypatch, **sizes):
    changed = replace(LAPTOP, **sizes)
    monkeypatch.setattr(planner, "detect_hardware", lambda: changed)
    return changed


def test_nothing_that_can_be_had_is_faster(setup):
    layout, why = choose_layout(setup, Grpo(), 8)
    assert layout.num_devices == 8
    assert str(layout) in why
    best = make_candidate(setup, Grpo(), layout, LAPTOP)
    for text in ("dp8", "dp8 / ep8", "tp2 dp4", "tp2 dp4 / ep8"):
        assert make_candidate(setup, Grpo(), Layout.parse(text), LAPTOP).seconds >= best.seconds


def test_automatic_layout_of_dense_network_has_no_experts():
    dense = build_setup(RunConfig(model="tiny-dense"), Grpo().divided(1))
    layout, why = choose_layout(dense, Grpo(), 8)
    assert layout.ep == layout.etp == 1
    # Not the layouts of a network with experts: each would be there once for each ep and etp.
    number = re.search(r"fastest of (\d+) layouts", why)
    assert number is not None and int(number[1]) <= sum(1 for _ in layouts(8, has_experts=False))


@pytest.mark.slow
def test_with_less_memory_it_is_another(setup, monkeypatch):
    roomy, _ = choose_layout(setup, Grpo(), 4)
    needs = run_memory(make_candidate(setup, Grpo(), roomy, LAPTOP).setup).peak
    hardware = on_hardware(monkeypatch, memory=0.99 * needs / planner.MEMORY_FRACTION)
    tight, why = choose_layout(setup, Grpo(), 4)
    assert tight != roomy
    assert run_memory(make_candidate(setup, Grpo(), tight, hardware).setup).peak < needs
    assert re.search(r" but \d+, which need too much memory;", why)


def test_every_stage_has_as_many_chunks_as_leave_it_no_deeper(setup):
    """Seven layers on two stages are four and three: in two chunks each of two and less."""
    uneven = replace(setup, model=replace(setup.model, num_layers=7))
    found = {(one.pp, one.vpp) for one in planner._valid_layouts(uneven, 2, LAPTOP)}
    assert found == {(1, 1), (2, 1), (2, 2)}


def test_dispatch_is_chosen_for_each_layout(setup):
    little = replace(setup, run=replace(setup.run, buffer_factor=0.9))
    execution = replace(setup.model.execution, buffer_factor=0.9)
    little = replace(little, model=replace(setup.model, execution=execution))
    chosen = {
        layout: with_layout(little, Grpo(), Layout.parse(layout)).model.execution.dispatch
        for layout in ("dp2 / ep2", "dp8 / ep8", "dp2")
    }
    assert chosen == {"dp2 / ep2": "all_gather", "dp8 / ep8": "all_to_all", "dp2": None}


def test_layouts_that_refuse_the_overlap_that_is_asked_for_are_left_out(setup):
    execution = replace(setup.model.execution, overlap_grad_reduce=True)
    asked = replace(setup, model=replace(setup.model, execution=execution))
    with pytest.raises(ValueError, match="the stages of a pipeline sum gradients after"):
        with_layout(asked, Grpo(), Layout.parse("pp2 dp2"))
    with_layout(asked, Grpo(), Layout.parse("dp4"))


def test_layouts_without_the_messages_that_a_setting_compresses_are_left_out(setup):
    execution = replace(setup.model.execution, activation_wire="float8_e4m3fn")
    asked = replace(setup, model=replace(setup.model, execution=execution))
    with pytest.raises(ValueError, match="activation_wire='float8_e4m3fn' changes nothing"):
        with_layout(asked, Grpo(), Layout.parse("dp4"))
    layout, _ = choose_layout(asked, Grpo(), 4)
    assert layout.ep * layout.etp > 1


def test_slow_links_between_devices_are_avoided(setup, monkeypatch):
    on_hardware(monkeypatch, inside=1e3, outside=1e3)
    layout, _ = choose_layout(setup, Grpo(), 4)
    assert (layout.tp, layout.cp, layout.ep, layout.etp) == (1, 1, 1, 1)


@pytest.mark.slow
def test_where_nothing_fits_it_says_what_is_missing(setup, monkeypatch):
    on_hardware(monkeypatch, memory=1e6)
    with pytest.raises(ValueError, match=r"nothing fits on 2 devices with 0.00092 GB .* --fsdp"):
        choose_layout(setup, Grpo(), 2)


def test_where_no_layout_is_possible_it_says_why(setup):
    setup = replace(setup, run=replace(setup.run, rollout_layout="dp3"))
    with pytest.raises(
        ValueError, match=r"no layout of 4 devices fits this run, .*dp3.* has 4: .*that. Choose"
    ):
        choose_layout(setup, Grpo(), 4)


def test_batches_are_those_of_the_layout(setup):
    there = with_layout(setup, Grpo(), Layout.parse("dp4"))
    built = build_setup(RunConfig(layout="dp4"), Grpo().divided(4))
    assert there.recipe == built.recipe
    assert there.geometry.num_micro_batches == built.geometry.num_micro_batches
    with pytest.raises(ValueError, match="is not supported with pp"):
        packed = replace(setup, run=replace(setup.run, packing=True))
        with_layout(packed, Grpo(), Layout.parse("pp3"))


def test_an_unknown_accelerator_is_named(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "Somebody's Accelerator"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ValueError, match='does not support "Somebody\'s Accelerator"'):
        planner.detect_hardware()
