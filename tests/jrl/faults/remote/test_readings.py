"""Readings that are no values: DCGM's blanks of each kind, and what a metric cannot be."""

import numpy as np
import pytest

from jrl.faults.collect.vocabulary import MEANINGS, RANGES, mask_valid, of_any_gpu
from jrl.faults.remote.exporters import EXPORTED, build_fleet, find_metric, mask_blanks
from jrl.faults.remote.series import Series

INT32, INT64, FP64 = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 2**47
# Blank, not found, not supported, not permitted, of each of DCGM's types, as exporters write them.
SENTINELS = [
    *(str(INT32 + each) for each in range(4)),
    *(str(INT64 + each) for each in range(4)),
    *(f"{FP64 + each}.000000" for each in range(4)),
    *("2147483647", "1.40737488355328e+14", "9.223372036854776e+18", "18446744073709551615"),
]
DCGM = sorted(name for name in EXPORTED if name.startswith("DCGM_"))


def fleet_of(name, readings, **labels):
    times = 15.0 * np.arange(len(readings))
    labels = {"__name__": name, "instance": "a", **labels}
    return build_fleet([Series(labels, times, np.array([float(each) for each in readings]))])


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_a_sentinel_is_no_value_of_any_metric_of_dcgm(sentinel):
    for name in DCGM:
        column, kind = find_metric(name)
        fleet = fleet_of(name, [1, 1, sentinel, 1, 1])
        rest = [np.nan, 0, np.nan, 0, 0] if kind == "counter" else [1, 1, np.nan, 1, 1]
        np.testing.assert_equal(fleet.values[0, 0].tolist(), rest, err_msg=name)
        assert fleet.blank == {("a", column)}


@pytest.mark.parametrize("value", [0, 1, 79, 2147483631, 2147483648, 2**47 - 1, 2**47 + 16, 2**62])
def test_mask_blanks_keeps_neighbours_of_sentinels(value):
    assert not mask_blanks(np.array([float(value)]))[0]


@pytest.mark.parametrize(
    ("name", "sane", "insane"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", [0, 45, 95], [-273, 255, 65535, 2**31 + 1]),
        ("DCGM_FI_DEV_MEMORY_TEMP", [0, 88], [-128, 1e6]),
        ("DCGM_FI_DEV_GPU_UTIL", [0, 55, 100], [-1, 101, 4294967295]),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", [0, 0.4, 1], [-0.5, 1e3, 1e14]),
        ("DCGM_FI_DEV_POWER_USAGE", [0, 71.5, 1200], [-1, 4294967.295, 1e6]),
        ("DCGM_FI_DEV_SM_CLOCK", [0, 1980], [-1, 4294967295]),
        ("DCGM_FI_DEV_MEM_CLOCK", [0, 2619, 14001], [-1, 4294967295]),
        ("DCGM_FI_DEV_XID_ERRORS", [0, 31, 172], [-1, 4294967295, 10**6]),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", [0, 3, 10**6], [-1, 4294967295]),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", [0, 1], [-1, 2, 255]),
        ("DCGM_FI_DEV_FB_USED", [0, 81000, 288000], [-1, 1e15]),
        ("node_infiniband_link_downed_total", [0, 7, 255], [-1, 4294967295]),
        ("node_edac_uncorrectable_errors_total", [0, 2], [-1, 1.8e19]),
        ("node_memory_MemAvailable_bytes", [0, 2e12], [-1, 1.8e19]),
    ],
)
def test_a_reading_out_of_a_metrics_range_is_none(name, sane, insane):
    for value in sane:
        assert fleet_of(name, [value]).values[0, 0, 0] == np.float32(value)
    for value in insane:
        fleet = fleet_of(name, [sane[-1], value])
        assert np.isnan(fleet.values[0, 0, 1]) and fleet.blank


def test_every_level_and_every_fatal_counter_has_a_range():
    ranged = {column for column, kind in EXPORTED.values() if kind != "counter"}
    assert ranged <= set(RANGES)
    assert all(mask_valid(name, np.array(limits)).all() for name, limits in RANGES.items())
    assert mask_valid("gpu3/temperature", np.array([20.0, 1e3, np.nan])).tolist() == [1, 0, 0]
    assert mask_valid("jrl_gpu3_temperature", np.array([20.0, 1e3])).tolist() == [1, 0]
    assert mask_valid("mine", np.array([-1e30, np.inf, np.nan])).tolist() == [1, 0, 0]
    assert set(map(of_any_gpu, RANGES)) - set(MEANINGS) < {
        *("gpu/xid", "gpu/ecc/uncorrected", "gpu/rows/remap_failure", "memory/ecc/uncorrected"),
        *("rdma/link_downed", "gpu/temperature/memory", "gpu/clock/memory", "memory/host", "x"),
    }


def test_a_counter_goes_on_across_a_blank():
    name = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
    fleet = fleet_of(name, [0, 150, str(INT64), 450, 600])
    np.testing.assert_equal(fleet.values[0, 0].tolist(), [np.nan, 10, np.nan, 10, 10])
    # A counter of 64 bits that counts beyond the blank of floating point is one.
    big = [2**47 + 1000 + 150 * each for each in range(3)]
    np.testing.assert_equal(fleet_of(name, big).values[0, 0].tolist(), [np.nan, 10, 10])


def test_before_the_first_error_a_blank_code_is_no_error():
    name = "DCGM_FI_DEV_XID_ERRORS"
    fleet = fleet_of(name, [str(INT64), str(INT32), 79, str(INT64), 79])
    np.testing.assert_equal(fleet.values[0, 0].tolist(), [0, 0, 79, np.nan, 79])
    assert np.isnan(fleet_of(name, [str(INT64)] * 3).values).all()
