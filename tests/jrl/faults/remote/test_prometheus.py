"""Prometheus' own answers become fleets, wrong ones one clear line, and our samples are exported.

``recorded/query_range.json`` is what a Prometheus 2.42 server answered that fetched once a second
from three of our exporters, to the query
``{__name__=~"jrl_(step_time|cpu_process|memory_process)"}``.
"""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from jrl.faults.collect.sampler import Exporter
from jrl.faults.collect.vocabulary import exported_name
from jrl.faults.remote.exporters import build_fleet
from jrl.faults.remote.prometheus import Prometheus, read_series

RECORDED = (Path(__file__).parents[1] / "recorded" / "query_range.json").read_bytes()


def read_answers(answers, machine="machine", requested=()):
    """Answers of a query with a step of a second, as a fleet."""
    series = read_series(answers, machine=machine, requested=requested)
    return build_fleet(series, label=machine, period=1.0, requested=requested)


def answer(*series):
    """A matrix of (labels, samples)."""
    result = [{"metric": labels, "values": values} for labels, values in series]
    data = {"resultType": "matrix", "result": result}
    return json.dumps({"status": "success", "data": data})


def test_the_recorded_answer_is_the_fleet_it_came_from():
    fleet = read_answers([RECORDED])
    assert fleet.machines == ("host-0", "host-1", "host-2")
    assert fleet.metrics == ("jrl_cpu_process", "jrl_memory_process", "jrl_step_time")
    assert (fleet.start, fleet.period, fleet.num_samples) == (1795266106.0, 1.0, 7)
    for entry in json.loads(RECORDED)["data"]["result"]:
        row = fleet.machines.index(entry["metric"]["machine"])
        samples = fleet.values[row, fleet.metrics.index(entry["metric"]["__name__"])]
        found = {fleet.times[at]: samples[at] for at in np.flatnonzero(np.isfinite(samples))}
        assert found == {time: np.float32(value) for time, value in entry["values"]}


def test_other_labels_serve_as_names_too():
    fleet = read_answers([RECORDED], machine="instance")
    assert fleet.machines == tuple(f"127.0.0.1:1930{number}" for number in range(3))


def test_several_answers_with_gaps_and_without_order_are_one_fleet():
    first = answer(({"machine": "b", "__name__": "x"}, [[7, "1.5"], [5, "NaN"], [4, "2"]]))
    second = answer(({"machine": "a", "__name__": "y"}, [[6, "+Inf"], [7, "3"]]))
    fleet = read_answers([first, second])
    nan = np.nan
    assert (fleet.machines, fleet.metrics, fleet.start) == (("a", "b"), ("x", "y"), 4.0)
    np.testing.assert_array_equal(fleet.values[1, 0], [2, nan, nan, 1.5])
    np.testing.assert_array_equal(fleet.values[0, 1], [nan, nan, nan, 3])


FAR = [({"machine": "a", "__name__": f"x{each}"}, [[9, "1"]]) for each in range(599)]
ONE = ({"machine": "a", "__name__": "x"}, [[1, "2"]])


def test_times_between_two_ticks_have_a_place():
    fleet = read_answers([answer((ONE[0], [[-1.5, "1"], [1, "2"]]))])
    np.testing.assert_array_equal(fleet.values[0, 0], [1, np.nan, np.nan, 2])


def test_an_answer_with_unknown_names_of_exporters_is_read_without_them():
    one = {"machine": "a", "gpu": "0"}
    parts = [
        ({**one, "__name__": "DCGM_FI_DEV_GPU_UTIL"}, [[1, "90"]]),
        ({**one, "__name__": "DCGM_FI_DEV_ENC_UTIL"}, [[1, "0"]]),
        ({**one, "__name__": "DCGM_FI_DEV_ENC_UTIL", "gpu": "1"}, [[1, "4"]]),
        ({"__name__": "up", "job": "dcgm"}, [[1, "1"]]),
    ]
    assert read_answers([answer(*parts)]).metrics == ("gpu0/duty_cycle",)
    asked = read_answers([answer(*parts)], requested=("DCGM_FI_DEV_ENC_UTIL",))
    assert asked.metrics == ("DCGM_FI_DEV_ENC_UTIL", "gpu0/duty_cycle")
    assert asked.values[0, 0, 0] == 2


def test_an_answer_without_series_is_an_empty_fleet():
    assert read_answers([answer()]).values.shape == (0, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECORDED[:-40], "not JSON, or is truncated"),
        (b"\xff\xfe", "not JSON"),
        ('{"status":"error","errorType":"bad_data","error":"parse error"}', "bad_data: parse err"),
        ('{"status":"success","data":{"resultType":"vector","result":[]}}', "is a vector, not a"),
        ("[1]", "is a None, not a matrix"),
        ("[" * 100_000, "not JSON, or is truncated"),
        ('{"data":{"resultType":"matrix"}}', "has no list of series"),
        ('{"data":{"resultType":"matrix","result":{"a":1}}}', "has no list of series"),
        ('{"data":{"resultType":"matrix","result":[{"metric":[],"values":[]}]}}', "not as Prom"),
        (answer((ONE[0], [[10**400, "1"]])), "not as Prometheus writes it"),
        (answer(({"__name__": "x"}, [[1, "2"]])), "no label 'machine': it has __name__"),
        (answer(ONE, ({**ONE[0], "gpu": "1"}, [[1, "2"]])), "two series are x of a: aggregate"),
        (answer((ONE[0], [[1, "two"]])), "not as Prometheus writes it"),
        (answer((ONE[0], [[1]])), "not as Prometheus writes it"),
        (answer((ONE[0], [["NaN", "1"]])), "a time that is not a number"),
        (answer((ONE[0], [[1, "1"], [4e12, "1"]])), "46296296 days away from the others"),
        (
            answer((ONE[0], [[0, "1"], [5e5, "1"]]), *FAR),
            "spans 500001 ticks .* 600 metrics, 1 GiB",
        ),
    ],
)
def test_a_wrong_answer_is_one_clear_line(content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_answers([content])
    assert "\n" not in str(error.value)


def test_the_exporter_serves_the_newest_sample():
    samples = {"step/time": 0.25, "gpu0/power": 300.0}
    with Exporter(lambda: (1.0, samples), "host-0", 0) as exporter:
        address = f"http://127.0.0.1:{exporter.port}/metrics"
        first = urllib.request.urlopen(address, timeout=10).read().decode()
        samples["step/time"] = 0.5
        second = urllib.request.urlopen(address, timeout=10).read().decode()
        with pytest.raises(
            ValueError, match=rf"port={exporter.port} on 127\.0\.0\.1 is not available"
        ):
            Exporter(lambda: (0.0, {}), "host-1", exporter.port)
    assert 'jrl_step_time{machine="host-0"} 0.25\n' in first
    assert 'jrl_step_time{machine="host-0"} 0.5\n' in second
    assert 'jrl_gpu0_power{machine="host-0"} 300.0\n' in second
    assert exported_name("pcie/in.x") == "jrl_pcie_in_x"


def test_a_server_needs_an_address_of_the_web():
    with pytest.raises(ValueError, match="must begin with http"):
        Prometheus("file:///etc")
