"""One metric under its names: the sampler's, Prometheus's, the models'."""

from types import SimpleNamespace

import pytest

from benchmarks.faults.simulate import METRICS
from jrl.faults.collect.sampler import Gpus
from jrl.faults.collect.vocabulary import (
    MEANINGS,
    STEP_TIME,
    exported_name,
    find_recorded,
    meaning,
    search_order,
)
from jrl.faults.minder.vae import shipped_models


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("cpu/process", "cpu_usage"),
        ("gpu0/power", "gpu_power_draw"),
        ("gpu11/clock/sm", "gpu_clock"),
        ("jrl_gpu3_nvlink_in", "nvlink_bandwidth"),
        ("jrl_step_time", STEP_TIME),
        ("tensor_core_activity", "tensor_core_activity"),
        ("gpu_power_draw", "gpu_power_draw"),
        ("queue/length", "queue/length"),
    ],
)
def test_meaning_of_recorded_names(recorded, expected):
    assert meaning(recorded) == expected


def test_every_meaning_has_a_model_and_an_exported_name():
    assert set(MEANINGS.values()) - {STEP_TIME} <= set(METRICS) <= set(shipped_models())
    for name, known in MEANINGS.items():
        assert meaning(exported_name(name)) == meaning(name) == known


def test_every_metric_of_a_gpu_has_a_meaning():
    none = Gpus(SimpleNamespace(nvmlDeviceGetCount=lambda: 0))  # readers ask a driver when called
    names = {*none._gauges(), *none._counters()}
    silent = {name for name in names if meaning(f"gpu0/{name}") == f"gpu0/{name}"}
    assert silent == {"clock/memory"}  # which no model was trained on


def test_the_wanted_come_in_their_order_under_the_names_recorded():
    recorded = ("gpu1/power", "step/time", "gpu0/power", "cpu/process")
    assert find_recorded(("cpu_usage", "gpu_power_draw"), recorded) == (
        "cpu/process",
        "gpu1/power",
        "gpu0/power",
    )
    assert find_recorded(("gpu0/power", "disk_usage"), recorded) == ("gpu0/power",)


def test_search_order_leaves_out_memory_unless_requested():
    recorded = ("memory/process", "jrl_gpu0_memory", "queue/length", "cpu/process")
    assert search_order(("cpu_usage",), recorded) == ("cpu/process", "queue/length")
    assert search_order(("memory/process",), recorded)[0] == "memory/process"
