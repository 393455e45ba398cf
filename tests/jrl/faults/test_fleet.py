"""A fleet is what its names say, survives a file, and says what is wrong with one that cannot."""

import numpy as np
import pytest

from jrl.faults.collect.fleet import Alarm, Fleet


def fleet(machines: int = 3, metrics: int = 2, time: int = 5) -> Fleet:
    values = np.arange(machines * metrics * time, dtype=np.float32).reshape(machines, metrics, time)
    values[1, 0, 2] = np.nan
    return Fleet(
        tuple(f"m{i}" for i in range(machines)), tuple("abcdef"[:metrics]), 1e9, 1.0, values
    )


def test_a_saved_fleet_comes_back_to_the_bit(tmp_path):
    before = fleet()
    before.save(tmp_path / "fleet.npz")
    after = Fleet.load(tmp_path / "fleet.npz")
    assert (after.machines, after.metrics) == (before.machines, before.metrics)
    assert (after.start, after.period) == (before.start, before.period)
    assert after.values.dtype == np.float32
    np.testing.assert_array_equal(after.values, before.values)


@pytest.mark.parametrize("size", [0, 1, 50, 300, -1])
def test_a_truncated_or_garbled_file_is_one_clear_line(tmp_path, size):
    fleet().save(tmp_path / "fleet.npz")
    content = (tmp_path / "fleet.npz").read_bytes()
    (tmp_path / "fleet.npz").write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"fleet\.npz is not a recorded fleet, or is damaged"):
        Fleet.load(tmp_path / "fleet.npz")


def test_every_wrong_byte_of_a_file_is_one_clear_line_or_none(tmp_path):
    fleet().save(tmp_path / "fleet.npz")
    content = (tmp_path / "fleet.npz").read_bytes()
    refused = 0
    for at in range(0, len(content), 7):
        wrong = bytearray(content)
        wrong[at] ^= 0b101
        (tmp_path / "fleet.npz").write_bytes(wrong)
        try:
            Fleet.load(tmp_path / "fleet.npz")
        except ValueError:  # anything else is the fault
            refused += 1
    assert refused > 10


def test_select_and_last_keep_names_and_times_together():
    chosen = fleet().select(["b"]).last(2)
    assert (chosen.metrics, chosen.start, chosen.end) == (("b",), 1e9 + 3, 1e9 + 5)
    np.testing.assert_array_equal(chosen.values, fleet().values[:, 1:, 3:])
    np.testing.assert_array_equal(chosen.times, [1e9 + 3, 1e9 + 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machines": ("a", "a", "b")}, "machines: 'a' occurs twice"),
        ({"metrics": ("a",)}, "values has shape"),
        ({"values": np.zeros((3, 2, 5))}, "must be float32"),
        ({"start": float("nan")}, "start=nan must be"),
        ({"period": 0.0}, r"period=0\.0 must be"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(change, message):
    good = fleet()
    parts = dict(
        machines=good.machines, metrics=good.metrics, start=1.0, period=1.0, values=good.values
    )
    with pytest.raises(ValueError, match=message):
        Fleet(**(parts | change))


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match="'power' was not recorded: choose among a, b"):
        fleet().select(["power"])


def test_an_alarm_is_one_line():
    alarm = Alarm("m1", "step time", 0.0, 12.0, {"score": 3.25, "scores": np.ones(4)})
    assert alarm.describe() == (
        "m1 stands out in step time since 1970-01-01 00:00:00 UTC, for 12 s (score 3.25)"
    )
