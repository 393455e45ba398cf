"""Records of several clocks become one fleet; what cannot take part is left out and said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.faults.collect.fleet import align
from jrl.faults.collect.record import Record, Writer, read_folder

START = 1_000_000.0
NOW = START + 59


def record(machine, times, values=None, columns=("step/time",), **changes) -> Record:
    times = np.asarray(times, np.float64)
    if values is None:
        values = times - START
    values = np.asarray(values, np.float32).reshape(len(times), len(columns))
    parts = dict(host="host", pid=1, begun=START, damaged=0, torn=0, ended=False)
    return Record(machine=machine, columns=columns, times=times, values=values, **(parts | changes))


def healthy(machine, **changes) -> Record:
    return record(machine, START + np.arange(60), **changes)


def states(aligned):
    return {each.machine: each.state for each in aligned.processes}


def test_each_sample_is_at_the_tick_nearest_to_its_time():
    skewed = record("b", START + np.arange(60) + 0.4, np.arange(60))
    fleet = align([healthy("a"), skewed], now=NOW, seconds=60).fleet
    assert fleet.machines == ("a", "b") and fleet.end == NOW + 1
    np.testing.assert_array_equal(fleet.values[0], fleet.values[1])
    np.testing.assert_array_equal(fleet.values[0, 0], np.arange(60))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(60)))
def test_the_order_of_samples_does_not_matter(order):
    shuffled = record("a", START + np.array(order))
    np.testing.assert_array_equal(
        align([shuffled], now=NOW, seconds=60).fleet.values,
        align([healthy("a")], now=NOW, seconds=60).fleet.values,
    )


def test_of_two_samples_at_a_tick_the_last_written_counts():
    double = record("a", [NOW - 1, NOW, NOW + 0.1, NOW - 1.1], [1, 2, 3, 4])
    fleet = align([double], now=NOW, seconds=10).fleet
    np.testing.assert_array_equal(fleet.values[0, 0, -2:], [4, 3])
    assert np.isnan(fleet.values[0, 0, :-2]).all()


def test_gaps_and_infinities_are_nan_and_metrics_the_union():
    a = record("a", [NOW - 3, NOW], [[1, np.inf], [2, 5]], ("x", "y"))
    b = record("b", [NOW - 1], [7], ("z",))
    fleet = align([a, b], now=NOW, seconds=4).fleet
    assert fleet.metrics == ("x", "y", "z")
    nan = np.nan
    np.testing.assert_array_equal(fleet.values[0, 0], [1, nan, nan, 2])
    np.testing.assert_array_equal(fleet.values[0, 1], [nan, nan, nan, 5])
    np.testing.assert_array_equal(fleet.values[1], [[nan] * 4, [nan] * 4, [nan, nan, 7, nan]])


def test_align_masks_invalid_readings():
    columns = ("gpu0/temperature", "gpu0/ecc/uncorrected", "mine")
    a = record("a", [NOW - 1, NOW], [[40, 0, -7], [4294967.0, 4e9, 9e9]], columns)
    fleet = align([a], now=NOW, seconds=10).fleet
    values = fleet.select(columns).values[0, :, -2:]
    np.testing.assert_array_equal(values, np.float32([[40, np.nan], [0, np.nan], [-7, 9e9]]))


def test_two_lives_of_a_machine_are_one_row():
    first = record("a", START + np.arange(20), ended=True)
    second = record("a", START + np.arange(30, 60), begun=START + 30)
    aligned = align([second, first], now=NOW, seconds=60)
    assert states(aligned) == {"a": "running"}
    gap = np.isnan(aligned.fleet.values[0, 0])
    np.testing.assert_array_equal(np.flatnonzero(gap), np.arange(20, 30))


def test_only_the_running_are_compared_and_the_others_are_said():
    ahead = record("ahead", START + 3600 + np.arange(60))
    behind = record("behind", START - 86400 + np.arange(60))
    silent = record("silent", START + np.arange(30))
    empty = record("empty", [])
    ended = healthy("ended", ended=True)
    aligned = align(
        [healthy("a", damaged=2, torn=3), ahead, behind, silent, empty, ended], now=NOW, seconds=60
    )
    assert aligned.fleet.machines == ("a",)
    assert states(aligned) == {
        "a": "running",
        "ahead": "clock ahead",
        "behind": "silent",
        "empty": "no data",
        "ended": "ended",
        "silent": "silent",
    }
    glance = {each.machine: each for each in aligned.processes}
    assert (glance["a"].damaged, glance["a"].torn, glance["ahead"].future) == (2, 3, 60)
    assert glance["silent"].age == 30 and np.isnan(glance["empty"].age)


def test_without_a_now_no_single_wrong_clock_moves_the_end():
    far = record("far", START + 1e9 + np.arange(60))
    aligned = align([healthy("a"), healthy("b"), healthy("c"), far], seconds=60)
    assert aligned.fleet.machines == ("a", "b", "c") and aligned.fleet.end == NOW + 1
    assert aligned.fleet.values.shape[2] == 60


def test_a_single_wrong_sample_in_the_future_costs_only_itself():
    odd = record("a", [*(START + np.arange(60)), START + 1e8])
    aligned = align([odd], now=NOW, seconds=60)
    assert states(aligned) == {"a": "running"} and aligned.processes[0].future == 1
    assert aligned.fleet.values.shape[2] == 60


def test_nothing_at_all_is_an_empty_fleet():
    aligned = align([], now=NOW)
    assert aligned.fleet.values.shape == (0, 0, 0) and aligned.processes == ()


def test_a_length_of_time_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"seconds=0\.0 must be"):
        align([], seconds=0.0)


def test_a_file_that_cannot_be_read_is_a_line_beside_the_others(tmp_path):
    Writer(tmp_path, "good", ("x",), begun=0).append(1.0, {"x": 2.0})
    (tmp_path / "bad.1.samples").write_bytes(b"rubbish" * 9)
    (tmp_path / "deleted.1.samples").symlink_to(tmp_path / "nothing")
    records, (bad, deleted) = read_folder(tmp_path)
    assert [each.machine for each in records] == ["good"]
    assert "bad.1.samples is not a record" in bad
    assert "deleted.1.samples cannot be read: No such file" in deleted
