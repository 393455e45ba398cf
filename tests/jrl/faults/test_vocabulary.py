"""One metric under its names: the sampler's, Prometheus's, the models'."""

import pytest

from jrl.faults.detect import shipped_models
from jrl.faults.simulate import METRICS
from jrl.faults.sources import Gpus
from jrl.faults.vocabulary import MEANINGS, STEP_TIME, exported_name, meaning, recorded_as, searched


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
def test_what_a_name_means(recorded, expected):
    assert meaning(recorded) == expected


def test_every_meaning_has_a_model_and_every_gpu_metric_a_meaning():
    assert set(MEANINGS.values()) - {STEP_TIME} <= set(METRICS) <= set(shipped_models())
    for name in (*Gpus.__new__(Gpus)._gauges.__annotations__,):
        assert name  # see the next test: the readers need a driver
    for name, known in MEANINGS.items():
        assert meaning(exported_name(name)) == meaning(name) == known
