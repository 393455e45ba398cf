"""Pages of DCGM's exporter, node exporter and cAdvisor: names, rates, sums, machines."""

import numpy as np
import pytest

from jrl.faults.collect.vocabulary import MEANINGS, is_error_rate, is_fatal, meaning
from jrl.faults.remote.exporters import (
    EXPORTED,
    SELECTOR,
    build_fleet,
    describe_ignored,
    find_metric,
)
from jrl.faults.remote.prometheus import read_page
from jrl.faults.remote.series import Series

PAGE = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-5f",modelName="NVIDIA H100",Hostname="n1"} 97
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-6a",modelName="NVIDIA H100",Hostname="n1"} 96
DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="n1",err_code="0",err_msg="No \\"Error\\", {none}"} 0
node_cpu_seconds_total{cpu="0",mode="idle"} 1.5e+06 1795266106000
node_load1 NaN
this is no metric
"""


def series(name, values, step=15.0, start=1000.0, **labels):
    times = start + step * np.arange(len(values))
    return Series({"__name__": name, **labels}, times, np.array(values, float))


def test_a_page_is_read():
    page = read_page(PAGE)
    found = page.samples
    assert page.unreadable == ["this is no metric"]
    assert [labels["__name__"] for labels, *_ in found] == [
        *["DCGM_FI_DEV_GPU_UTIL"] * 2,
        "DCGM_FI_DEV_XID_ERRORS",
        "node_cpu_seconds_total",
        "node_load1",
    ]
    assert found[1][0]["gpu"] == "1" and found[1][1] == 96
    assert found[2][0]["err_msg"] == 'No "Error", {none}'
    assert found[3][1:] == (1.5e6, 1795266106.0) and np.isnan(found[4][1])


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("a\tb", "a\tb"),
        (r"a\nb", "a\nb"),
        (r"C:\\nodes", r"C:\nodes"),
        (r"C:\data", r"C:\data"),  # no escape of the format
        ("a\u2028b", "a\u2028b"),
        (r"\"a\"", '"a"'),
    ],
)
def test_values_of_labels_are_any_text(raw, value):
    ((labels, number, _),) = read_page(f'up{{host="{raw}"}} 1\r\n').samples
    assert labels == {"__name__": "up", "host": value} and number == 1


def test_every_known_name_has_a_meaning_a_detector_uses():
    told = {column for column, _ in EXPORTED.values()}
    plain = {"gpu/clock/memory", "gpu/temperature/memory", "cpu/host", "memory/host"}
    for name in told - plain:
        assert name in MEANINGS or is_fatal(name) or is_error_rate(name), name
    assert len(EXPORTED) > 40 and all(name in SELECTOR for name in EXPORTED)
    # A server refuses `\w` in a quoted string as an unknown escape.
    assert "\\" not in SELECTOR
    assert meaning("gpu3/tensor_activity") == "tensor_core_activity"
    assert find_metric("node_ethtool_tx_prio3_pause") == ("network/pfc", "counter")
    assert find_metric("rx_nothing") is None


def test_counters_become_rates_and_devices_are_summed():
    fleet = build_fleet(
        [
            series("node_cpu_seconds_total", [0, 15, 45], instance="a:9100", cpu="0", mode="user"),
            series("node_cpu_seconds_total", [5, 20, 20], instance="a:9100", cpu="1", mode="user"),
            series("node_cpu_seconds_total", [0, 99, 999], instance="a:9100", cpu="1", mode="idle"),
            series("node_network_receive_bytes_total", [0, 9, 9], instance="a:9100", device="lo"),
            series("node_network_receive_bytes_total", [90, 0, 30], instance="a:9100", device="e"),
            series("DCGM_FI_DEV_GPU_UTIL", [90, 80, 70], instance="a:9400", gpu="3"),
            series("DCGM_FI_DEV_XID_ERRORS", [0, 0, 79], instance="a:9400", gpu="3"),
        ]
    )
    assert (fleet.machines, fleet.period) == (("a",), 15.0)
    rows = dict(zip(fleet.metrics, fleet.values[0].tolist(), strict=True))
    np.testing.assert_equal(rows["cpu/host"], [np.nan, 2, 2])
    np.testing.assert_equal(rows["network/in"], [np.nan, np.nan, 2])  # it was set back once
    assert rows["gpu3/duty_cycle"] == [90, 80, 70] and rows["gpu3/xid"] == [0, 0, 79]


def test_the_root_of_cadvisor_is_not_counted_twice():
    name = "container_cpu_usage_seconds_total"
    parts = [series(name, [0, 15], node="a", id=each) for each in ("/", "/kubepods/x")]
    assert build_fleet(parts).values[0, 0, 1] == 1
    pods = [series(name, [0, 15], node="b", container=each) for each in ("POD", "one", "two")]
    assert build_fleet(pods).values[0, 0, 1] == 2


def test_a_series_without_a_machine_is_refused():
    with pytest.raises(ValueError, match="no label 'machine' or 'node'"):
        build_fleet([series("queue_length", [1])])


# What DCGM's exporter serves by default, in one version or another, and is not compared here.
UNKNOWN = (
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "DCGM_FI_DEV_PCIE_TX_THROUGHPUT",
    "DCGM_FI_DEV_PCIE_RX_THROUGHPUT",
    "DCGM_FI_DEV_ENC_UTIL",
    "DCGM_FI_DEV_DEC_UTIL",
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_RESERVED",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
    "DCGM_FI_DEV_RETIRED_SBE",
    "DCGM_FI_DEV_RETIRED_DBE",
)
KNOWN = (
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_MEM_CLOCK",
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_MEM_COPY_UTIL",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
    "DCGM_FI_PROF_PCIE_TX_BYTES",
    "DCGM_FI_PROF_PCIE_RX_BYTES",
)


def test_the_default_list_of_dcgm_is_known_or_passed_over_with_a_note():
    of_two = [
        series(name, [1, 1], instance="a:9400", gpu=str(gpu))
        for name in (*KNOWN, *UNKNOWN)
        for gpu in range(2)
    ]
    fleet = build_fleet(of_two)
    assert all(find_metric(name) for name in KNOWN) and not any(map(find_metric, UNKNOWN))
    assert set(fleet.metrics) == {
        f"gpu{gpu}{find_metric(name)[0][3:]}" for name in KNOWN for gpu in range(2)
    }
    (note,) = describe_ignored(of_two)
    assert note.startswith("10 metrics of exporters are unknown and not compared: DCGM_")
    assert all(name in note for name in UNKNOWN)
    # One that is asked for is compared, the mean of what its devices give.
    (note,) = describe_ignored(of_two, UNKNOWN[:1])
    assert UNKNOWN[0] not in note and note.startswith("9 ")
    assert UNKNOWN[0] in build_fleet(of_two, requested=UNKNOWN[:1]).metrics


@pytest.mark.parametrize(
    "name",
    [
        *("DCGM_EXP_XID_ERRORS_COUNT", "dcgm_gpu_temp", "node_load1", "node_boot_time_seconds"),
        *("container_last_seen", "machine_cpu_cores", "go_goroutines", "process_open_fds"),
        *("promhttp_metric_handler_requests_total", "scrape_duration_seconds"),
    ],
)
def test_build_fleet_passes_over_exporters_own_metrics(name):
    other = series(name, [1, 2], instance="a:9400")
    assert build_fleet([other]).metrics == () and name in describe_ignored([other])[0]


@pytest.mark.parametrize("name", ["jrl_step_time", "queue_length", "machine_load", "goodput"])
def test_names_of_ones_own_are_compared(name):
    own = series(name, [1, 2], instance="a:9400")
    assert build_fleet([own]).metrics == (name,) and describe_ignored([own]) == []
