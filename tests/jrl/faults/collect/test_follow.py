"""A look at records reads what was written since the last one, and gives what a whole read does."""

import numpy as np

from jrl.faults.collect.record import Follower, Writer, read

COLUMNS = ("step/time", "cpu/process")
ROW = 8 + 4 * len(COLUMNS) + 4


def same(found, path, last=None):
    expected = read(path, last)
    np.testing.assert_array_equal(found.times, expected.times)
    np.testing.assert_array_equal(found.values, expected.values)
    assert (found.machine, found.ended, found.torn) == (
        expected.machine,
        expected.ended,
        expected.torn,
    )


def test_follower_reads_new_rows_only(tmp_path):
    writer = Writer(tmp_path, "host-0", COLUMNS, begun=0)
    for second in range(500):
        writer.append(second, {"step/time": 0.5})
    follower = Follower(tmp_path, last=300)
    (record,), unreadable = follower.read()
    assert unreadable == [] and len(record.times) == 300
    assert follower.bytes_read < 300 * ROW + 300  # and a header
    for second in range(500, 503):
        writer.append(second, {"cpu/process": 1.0})
    with writer.path.open("ab") as file:
        file.write(b"half a row")
    (record,), _ = follower.read()
    assert follower.bytes_read == 3 * ROW
    same(record, writer.path, last=300)
    follower.read()
    assert follower.bytes_read == 0


def test_an_end_a_damaged_row_and_a_new_file_in_its_place_are_seen(tmp_path):
    writer = Writer(tmp_path, "host-0", COLUMNS, begun=0)
    follower = Follower(tmp_path, last=50)
    writer.append(1, {"step/time": 0.5})
    follower.read()
    with writer.path.open("ab") as file:
        file.write(b"x" * ROW)
    writer.close(2)
    (record,), _ = follower.read()
    same(record, writer.path)
    assert record.ended and record.damaged == 1
    writer.path.unlink()
    again = Writer(tmp_path, "host-0", COLUMNS, begun=9)
    again.append(10, {"step/time": 0.7})
    (record,), _ = follower.read()
    same(record, again.path)
    again.path.write_bytes(b"rubbish, but long enough")
    records, (line,) = follower.read()
    assert records == [] and "is not a record" in line


def test_a_file_that_cannot_be_opened_is_a_line_and_is_read_when_it_can(tmp_path):
    writer = Writer(tmp_path, "host-0", COLUMNS, begun=0)
    writer.append(1, {"step/time": 0.5})
    late = tmp_path / "host-1.1.samples"
    late.symlink_to(tmp_path / "nothing")  # as one that was deleted between listing and reading
    follower = Follower(tmp_path, last=50)
    records, (line,) = follower.read()
    assert [each.machine for each in records] == ["host-0"]
    assert line.startswith(f"{late} cannot be read: No such file")
    late.unlink()
    other = Writer(tmp_path, "host-1", COLUMNS, begun=0)
    other.append(2, {"step/time": 0.5})
    (first, second), unreadable = follower.read()
    assert unreadable == []
    same(first, writer.path)
    same(second, other.path)
