"""After one measurement of each system the planner says what was published of the others."""

from dataclasses import replace
from itertools import chain

import pytest

from benchmarks.planner.calibration import (
    CALIBRATION_POINTS,
    CLUSTERS,
    LAUNCH_POINTS,
    MAPPINGS,
    MEGASCALE,
    SCALING,
    calibrate,
    fit,
    predict,
    predicted_mfu,
)
from benchmarks.planner.predicted import system_of
from moe.planner.cost import SYSTEMS, system_on
from moe.planner.models import PRESETS
from moe.planner.search import MEMORY_FRACTION, Plan


def said(row):
    found = predicted_mfu(row, fit(row.system))
    assert found is not None
    return found


@pytest.mark.parametrize("system", ["Megatron-Core", "MegaScale-MoE"])
def test_the_point_comes_out_as_measured(system):
    row = CALIBRATION_POINTS[system]
    assert said(row) == pytest.approx(row.mfu, abs=1e-3)
    assert 0.2 < calibrate(system).efficiency < 0.9


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_programs_have_the_fitted_numbers(system):
    # The table has five digits.
    assert fit(system).efficiency == pytest.approx(SYSTEMS[system].efficiency, rel=1e-4)
    assert fit(system).launch == pytest.approx(SYSTEMS[system].launch, rel=1e-4)
    fitted, stored = system_of(system, "gb200", True), system_on(system, "gb200")
    assert fitted.efficiency == pytest.approx(stored.efficiency, rel=1e-4)
    assert replace(fitted, efficiency=0.5, launch=0.0) == replace(
        stored, efficiency=0.5, launch=0.0
    )


@pytest.mark.parametrize("model", list(MAPPINGS))
def test_folding_is_first_of_the_published_mappings_with_a_pipeline(model):
    *others, folded = [predicted_mfu(row, fit(row.system)) for row in MAPPINGS[model]]
    assert folded is not None
    assert folded == max(found for found in [*others, folded] if found is not None)


def test_what_ran_out_of_memory_fits_in_no_more_than_all_of_it():
    """With full rematerialisation it comes to the limit, and without it is above."""
    for row in chain(*MAPPINGS.values()):
        plan = predict(row, fit(row.system))
        assert isinstance(plan, Plan)
        near = plan.memory.total > 0.99 * MEMORY_FRACTION * CLUSTERS[row.system].memory
        if row.mfu is None:
            assert near
            assert plan.method.execution.remat == "full"


def test_experts_are_launched_as_the_two_models_with_many_say():
    ratios = [said(row) / row.mfu for row in LAUNCH_POINTS if row.mfu is not None]
    assert ratios[0] * ratios[1] == pytest.approx(1, abs=0.01)
    assert 5e-5 < fit("Megatron-Core").launch < 2e-4


def gain(model):
    *_, without, folded = MAPPINGS[model]
    return said(folded) / said(without)


def test_folding_gains_most_where_experts_are_fine():
    # 1.06 and 1.68 were measured.
    assert gain("mixtral-8x22b") == pytest.approx(1.06, abs=0.04)
    assert gain("mixtral-8x22b-g8t8") == pytest.approx(1.68, rel=0.15)
    assert gain("qwen2-57b-a14b") == pytest.approx(1.10, abs=0.04)


@pytest.mark.parametrize("model", list(SCALING))
def test_strong_scaling_falls_as_measured(model):
    first, *_, last = SCALING[model]
    assert first.mfu is not None
    assert last.mfu is not None
    assert said(first) - said(last) == pytest.approx(first.mfu - last.mfu, abs=2)


def test_mixtral_scales_within_a_point_at_every_size():
    assert [said(row) for row in SCALING["mixtral-8x22b"]] == pytest.approx(
        [row.mfu for row in SCALING["mixtral-8x22b"]], abs=1
    )


def test_megascale_from_240_to_1440_devices():
    assert [said(row) for row in MEGASCALE] == pytest.approx([row.mfu for row in MEGASCALE], abs=3)


def test_published_rates_follow_from_published_times():
    """720 sequences of 8192 tokens take 21.61 s on 240 devices and 4.19 s on 1440."""
    flops = 720 * 8192 * PRESETS["megascale-352b"].training_flops(8192)
    peak = CLUSTERS["MegaScale-MoE"].peak
    for row, devices, seconds in ((MEGASCALE[0], 240, 21.61), (MEGASCALE[-1], 1440, 4.19)):
        assert 100 * flops / (devices * peak * seconds) == pytest.approx(row.mfu, abs=0.1)


def test_without_hidden_gradients_scaling_would_fall_twice_as_far():
    """What the overlap that is assumed is worth."""
    first, *_, last = SCALING["qwen2-57b-a14b"]
    bare = replace(calibrate("Megatron-Core"), hides_gradients=False)
    rates = [predicted_mfu(row, bare) for row in (first, last)]
    assert rates[0] is not None
    assert rates[1] is not None
    assert first.mfu is not None
    assert last.mfu is not None
    assert rates[0] - rates[1] > 1.9 * (first.mfu - last.mfu)
