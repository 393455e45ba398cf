"""Several series of one metric of a machine: members come, go, miss scrapes and change labels."""

import numpy as np
import pytest

from jrl.faults.remote.exporters import build_fleet
from jrl.faults.remote.series import Series, aggregate, mask_dips
from jrl.faults.standard import StandardDetector

TICKS, PERIOD, SICK = 64, 15.0, 3
TIMES = 1.8e9 + PERIOD * np.arange(TICKS)
NAN = np.nan


def series(name, values, ticks=slice(None), **labels):
    values = np.broadcast_to(np.asarray(values, float), TICKS)[ticks]
    kept = np.isfinite(values)
    return Series({"__name__": name, **labels}, TIMES[ticks][kept], values[kept])


def parts(name, values, machine, number=3, **labels):
    """The series of the parts of a machine: MIG instances of its GPU, or ports of its links."""
    part = {"gpu": "0", "UUID": f"GPU-{machine}"} if name.startswith("DCGM") else {"device": "m0"}
    key = "GPU_I_ID" if name.startswith("DCGM") else "port"
    return [
        series(name, values, instance=f"10.0.0.{machine}:1", **part, **{key: str(i)}, **labels)
        for i in range(number)
    ]


TOTALS = [
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "node_infiniband_link_downed_total",
    "node_edac_uncorrectable_errors_total",
]
OLD = 2.0
STEP = np.where(np.arange(TICKS) < 30, OLD, OLD + 1)


def with_hole(each, ticks):
    values, times = np.delete(each.values, ticks), np.delete(each.times, ticks)
    return Series(each.labels, times, values)


def with_values(each, ticks, value):
    values = each.values.copy()
    values[ticks] = value
    return Series(each.labels, each.times, values)


def relabelled(each, at, **labels):
    """A series that has other labels from a tick on."""
    later = Series({**each.labels, **labels}, each.times[at:], each.values[at:])
    return [Series(each.labels, each.times[:at], each.values[:at]), later]


def part_of(each, key, value):
    return Series({**each.labels, key: value}, each.times[25:], each.values[25:])


HARMLESS = {
    "misses_a_scrape": lambda one, *rest: [with_hole(one, [20]), *rest],
    "misses_many": lambda one, *rest: [with_hole(one, range(20, 40)), *rest],
    "ends": lambda one, *rest: [with_hole(one, range(30, TICKS)), *rest],
    "reads_0_once": lambda one, *rest: [with_values(one, 20, 0), *rest],
    "reads_0_twice": lambda one, *rest: [with_values(one, [20, 21], 0), *rest],
    "reads_less_once": lambda one, *rest: [with_values(one, 20, OLD - 1), *rest],
    "is_reset": lambda one, *rest: [with_values(one, range(20, TICKS), 0), *rest],
    "new_part_with_old_errors": lambda one, *rest: [
        *(one, *rest),
        part_of(one, "GPU_I_ID" if "gpu" in one.labels else "port", "9"),
    ],
    "other_pod": lambda one, *rest: [*relabelled(one, 20, pod="b", namespace="x"), *rest],
    "other_job": lambda one, *rest: [*relabelled(one, 20, job="b"), *rest],
    "other_port": lambda one, *rest: [
        *relabelled(one, 20, instance=one.labels["instance"] + "1"),
        *rest,
    ],
    "scraped_twice": lambda one, *rest: [
        *(one, *rest),
        Series({**one.labels, "job": "b"}, one.times[25:], one.values[25:]),
    ],
}


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("change", HARMLESS)
def test_a_total_of_old_errors_names_nobody(name, change):
    fleet = []
    for machine in range(10):
        of_machine = parts(name, OLD, machine)
        fleet += HARMLESS[change](*of_machine) if machine == SICK else of_machine
    assert StandardDetector()(build_fleet(fleet)) == []


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("change", HARMLESS)
def test_a_new_error_of_another_part_is_named_all_the_same(name, change):
    fleet = []
    for machine in range(10):
        of_machine = parts(name, OLD, machine)
        if machine == SICK:
            of_machine[1] = with_values(of_machine[1], range(40, TICKS), OLD + 1)
            of_machine = HARMLESS[change](*of_machine)
        fleet += of_machine
    (alarm,) = StandardDetector()(build_fleet(fleet))
    assert (alarm.machine, alarm.start) == (f"10.0.0.{SICK}", TIMES[40])
    assert alarm.evidence["after"] - alarm.evidence["before"] == 1


@pytest.mark.parametrize(
    ("values", "moved"),
    [
        ([3, 0, 3], False),
        ([3, 0, 0, 3], False),
        ([3, 0, 4], True),
        ([3, 0, 0, 0, 3], True),  # a reset, and new errors
        ([3, 0, 1], True),
        ([3, NAN, 0, NAN, 3], False),
        ([0, 0, 3], True),
        ([3, 3, 0], False),
    ],
)
def test_aggregate_total_moves_beyond_its_maximum_only(values, moved):
    values = np.r_[np.full(TICKS - len(values), values[0]), values]
    fleet = [
        series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", values if i == 3 else 0, instance=f"n{i}", gpu="0")
        for i in range(6)
    ]
    assert bool(StandardDetector()(build_fleet(fleet))) == moved


@pytest.mark.parametrize(
    ("codes", "masked"),
    [([79, 0, 79], [1]), ([79, 0, 45], []), ([79, 45, 79], []), ([79, 0, 0, 0, 79], [])],
)
def test_a_code_is_masked_only_where_it_reads_0_between_two_equal(codes, masked):
    assert np.flatnonzero(mask_dips(np.array(codes, float), zeros_only=True)).tolist() == masked


def test_a_part_with_an_old_code_that_misses_a_scrape_names_nobody():
    fleet = []
    for machine in range(6):
        of_machine = parts("DCGM_FI_DEV_XID_ERRORS", 0, machine)
        if machine == SICK:
            of_machine[0] = with_hole(with_values(of_machine[0], slice(None), 79), [20])
        fleet += of_machine
    assert StandardDetector()(build_fleet(fleet)) == []


ACTIVITY = ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
LOAD = {
    "idle_part_is_new": lambda busy, idle: [busy, with_hole(idle, range(25))],
    "idle_part_ends": lambda busy, idle: [busy, with_hole(idle, range(25, TICKS))],
    "idle_part_comes_and_goes": lambda busy, idle: [busy, with_hole(idle, range(20, 40))],
    "busy_part_misses_scrapes": lambda busy, idle: [with_hole(busy, [20, 21, 40]), idle],
}


@pytest.mark.parametrize("change", LOAD)
def test_a_level_does_not_move_because_a_part_comes_or_goes(change):
    random = np.random.default_rng(0)
    fleet = []
    for machine in range(10):
        for name in ACTIVITY:
            busy, idle = parts(name, 0.9 * random.normal(1, 0.02, TICKS), machine, number=2)
            idle = with_values(idle, slice(None), 0.0)
            others = [busy] if change == "idle_part_is_new" else [busy, idle]
            fleet += LOAD[change](busy, idle) if machine == SICK else others
    assert StandardDetector(past=0)(build_fleet(fleet)) == []


def test_a_busy_part_that_becomes_slow_is_named_beside_a_new_one():
    random = np.random.default_rng(0)
    fleet = []
    for machine in range(10):
        for name in ACTIVITY:
            busy, idle = parts(name, 0.9 * random.normal(1, 0.02, TICKS), machine, number=2)
            if machine == SICK:
                busy = with_values(busy, slice(34, None), 0.5)
                fleet.append(with_hole(with_values(idle, slice(None), 0.0), range(25)))
            fleet.append(busy)
    assert [alarm.machine for alarm in StandardDetector()(build_fleet(fleet))] == [f"10.0.0.{SICK}"]


def test_a_rate_of_one_part_that_misses_a_scrape_stays():
    steady = np.array([10.0, 10.0, 10.0, 10.0])
    other = np.array([5.0, NAN, 5.0, 5.0])
    np.testing.assert_array_equal(
        aggregate("counter", ["a", "b"], np.stack([steady, other])), [15, 15, 15, 15]
    )
    # What all parts missed stays unknown, and what is one part twice counts once.
    gap = np.array([10.0, NAN, 10.0, 10.0])
    assert np.isnan(aggregate("counter", ["a", "b"], np.stack([gap, other]))[1])
    assert aggregate("counter", ["a", "a"], np.stack([steady, steady])).tolist() == [10] * 4


def test_a_part_without_any_reading_changes_nothing():
    nothing = np.full(4, NAN)
    for kind in ("level", "counter", "total", "code"):
        rows = np.stack([np.array([1.0, 1.0, NAN, 1.0]), nothing])
        np.testing.assert_array_equal(aggregate(kind, ["a", "b"], rows), [1, 1, NAN, 1])
        assert np.isnan(aggregate(kind, ["a", "b"], np.stack([nothing, nothing]))).all()
