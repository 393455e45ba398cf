"""What was written is read to the bit; what a kill or a bad disk left is left out and counted."""

import os
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.faults.collect.record import Writer, read

COLUMNS = ("cpu", "step/time", "power")


def write(folder, rows: int = 5, machine: str = "host-0"):
    writer = Writer(folder, machine, COLUMNS, begun=100.0)
    for row in range(rows):
        writer.append(100.0 + row, {"cpu": 0.1 + row, "power": -row})
    return writer


def test_samples_come_back_to_the_bit(tmp_path):
    record = read(write(tmp_path).path)
    assert (record.machine, record.columns, record.begun) == ("host-0", COLUMNS, 100.0)
    assert (record.pid, record.damaged, record.torn, record.ended) == (os.getpid(), 0, 0, False)
    np.testing.assert_array_equal(record.times, 100.0 + np.arange(5))
    np.testing.assert_array_equal(record.values[:, 0], np.float32(0.1 + np.arange(5)))
    assert np.isnan(record.values[:, 1]).all()
    np.testing.assert_array_equal(record.values[:, 2], -np.arange(5, dtype=np.float32))


def test_the_last_rows_alone_can_be_read(tmp_path):
    record = read(write(tmp_path).path, last=2)
    np.testing.assert_array_equal(record.times, [103.0, 104.0])
    assert read(write(tmp_path).path, last=99).times.shape == (5,)


def test_a_process_that_closes_has_ended_and_the_next_gets_a_file_of_its_own(tmp_path):
    first, second = write(tmp_path), write(tmp_path, rows=2)
    first.close(105.0)
    first.close(106.0)
    assert first.path.name == "host-0.1.samples" and second.path.name == "host-0.2.samples"
    assert read(first.path).ended and len(read(first.path).times) == 5
    assert not read(second.path).ended


def test_every_torn_end_is_left_out_and_counted(tmp_path):
    path = write(tmp_path).path
    content = path.read_bytes()
    size = 8 + 4 * len(COLUMNS) + 4
    header = len(content) - 5 * size
    for cut in range(header, len(content)):
        path.write_bytes(content[:cut])
        record = read(path)
        whole, torn = divmod(cut - header, size)
        assert (len(record.times), record.torn, record.damaged) == (whole, torn, 0)


@pytest.mark.parametrize("size", [0, 7, 15, 16, 40])
def test_a_header_cut_short_is_one_clear_line(tmp_path, size):
    path = write(tmp_path).path
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"host-0\.1\.samples .*header"):
        read(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_wrong_byte_loses_one_row_or_is_said(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("faults")).path
    content = bytearray(path.read_bytes())
    header = len(content) - 5 * (12 + 4 * len(COLUMNS))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if at < header:
        with pytest.raises(ValueError, match=r"not a record of samples|damaged header"):
            read(path)
    else:
        record = read(path)
        assert (record.damaged, len(record.times)) == (1, 4)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_read_refuses_random_bytes_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("faults") / "x.samples"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.samples"):
        read(path)


@pytest.mark.parametrize("header", ["[]", "{", "[" * 9999, '{"columns": 3}', '{"columns": ["a"]}'])
def test_a_header_that_no_sampler_wrote_is_one_clear_line(tmp_path, header):
    path, text = tmp_path / "x.samples", header.encode()
    path.write_bytes(struct.pack("<8sII", b"JRLFAULT", len(text), zlib.crc32(text)) + text)
    with pytest.raises(ValueError, match=r"x\.samples has a header that no sampler wrote"):
        read(path)


def test_a_block_of_zeros_at_the_end_is_damaged_rows(tmp_path):
    """What a file system leaves after a power cut."""
    path = write(tmp_path).path
    with path.open("ab") as file:
        file.write(bytes(3 * (12 + 4 * len(COLUMNS))))
    record = read(path)
    assert (len(record.times), record.damaged) == (5, 3)


KILLED = """
import sys
from jrl.faults.collect.record import Writer
writer = Writer(sys.argv[1], "host-0", [f"m{i}" for i in range(300)], begun=0)
row = 0
while True:
    writer.append(row, {f"m{i}": row for i in range(300)})
    row += 1
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_writing_loses_no_earlier_sample(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    path = tmp_path / "host-0.1.samples"
    seen = 0
    deadline = time.monotonic() + 60
    while seen < 50 and time.monotonic() < deadline:  # read while it is written
        time.sleep(0.01)
        seen = len(read(path).times) if path.exists() and path.stat().st_size > 4096 else 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = read(path)
    assert len(record.times) >= seen >= 50 and record.damaged == 0 and not record.ended
    np.testing.assert_array_equal(record.times, np.arange(len(record.times)))
    np.testing.assert_array_equal(record.values, np.tile(record.times[:, None], 300))


def test_bad_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="machine='a/b' must be"):
        Writer(tmp_path, "a/b", COLUMNS, begun=0)
    with pytest.raises(ValueError, match="must all be different"):
        Writer(tmp_path, "a", ("x", "x"), begun=0)
    with pytest.raises(ValueError, match="'disk' is not a column of a"):
        Writer(tmp_path, "a", COLUMNS, begun=0).append(1.0, {"disk": 1.0})
