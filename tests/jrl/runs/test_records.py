import errno
import json
import math
import os
import stat
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jrl.runs import records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *lines):
    with records.Appender(path) as file:
        for step, record in lines:
            file.append(step, record)


@given(st.floats(width=64))
def test_floats_round_trip_bit_for_bit(value):
    line = json.dumps({"x": records.plain(value)}, allow_nan=False)
    back = float(json.loads(line)["x"])
    if math.isnan(value):
        assert math.isnan(back)
    else:
        assert struct.pack("d", back) == struct.pack("d", value)


def test_scalars_of_numpy_and_jax_are_numbers(path):
    third = np.float32(1) / np.float32(3)
    write(path, (2, {"a": third, "b": jnp.float32(0.1), "c": jnp.int32(7), "d": 5}))
    (record,) = records.read_metrics(path)
    assert np.float32(record["a"]) == third and np.float32(record["b"]) == np.float32(0.1)
    assert record["c"] == 7 and record["step"] == 2
    assert isinstance(record["d"], int)


def test_nan_and_infinities_are_valid_json(path):
    write(path, (1, {"a": math.nan, "b": math.inf, "c": -math.inf}))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = records.read_metrics(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf


def test_samples_keep_their_text(path):
    text = 'line\n\u2028"quoted" \x00 NaN \U0001f600'
    write(path, (3, {"completion": text, "score": 0.5, "kept": True, "tokens": [1, 2]}))
    assert path.read_bytes().count(b"\n") == 1
    assert records.read(path) == [
        {"step": 3, "completion": text, "score": 0.5, "kept": True, "tokens": [1, 2]}
    ]


def test_lone_surrogates_survive(path):
    write(path, (1, {"completion": "\ud800"}), (2, {"completion": "fine"}))
    assert [record["completion"] for record in records.read(path)] == ["\ud800", "fine"]


def test_each_line_is_on_disk_before_append_returns(path):
    with records.Appender(path) as file:
        file.append(1, {"a": 1.0})
        assert records.read(path) == [{"step": 1, "a": 1.0}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device of a full disk")
def test_a_line_that_a_full_disk_refuses_is_an_error_with_the_file():
    with records.Appender("/dev/full") as file:  # whose end writes nothing more
        with pytest.raises(
            OSError, match="No space left on device: free space on that disk, then"
        ) as refused:
            file.append(1, {"x": 1})
        assert refused.value.filename == "/dev/full"


def test_an_error_of_opening_keeps_its_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error, records.naming(tmp_path / "written"):
        (tmp_path / "missing").read_bytes()
    assert error.value.filename == str(tmp_path / "missing")


def test_appender_refuses_values_beyond_json(path):
    with records.Appender(path) as file:
        with pytest.raises(ValueError, match="of type object: JSON cannot"):
            file.append(1, {"a": object()})
        with pytest.raises(ValueError, match='record holds "step"'):
            file.append(1, {"step": 1})
    assert path.read_bytes() == b""


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_line_cut_anywhere_by_a_kill_is_dropped(path, cut):
    write(path, (1, {"a": 1.0}), (2, {"a": "ü", "b": 0.25}))
    first, second = path.read_bytes().splitlines(keepends=True)
    assert len(second) > 24
    path.write_bytes(first + second[:cut])
    assert records.read(path) == [{"step": 1, "a": 1.0}]


def test_a_line_that_lacks_only_its_newline_is_whole(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [record["step"] for record in records.read(path)] == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        b'{"step": 2, ',
        b"[2]",
        b'{"a": 1}',
        b"",
        b"\xff",
        b'{"step": 1.5}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 2, "a": ' + b"[" * 20000,
    ],
    ids=lambda line: line[:12],
)
def test_a_bad_line_before_the_last_is_an_error_with_its_number(path, bad):
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a JSON object") as caught:
        records.read(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", ['"1"', '"inf"', "null", "[1]", "{}", "true", "1" + "0" * 400])
def test_a_metric_that_is_no_number_is_an_error_with_its_line(path, value):
    path.write_text(f'{{"step": 0, "a": "NaN"}}\n{{"step": 1, "a": 1, "b/c": {value}}}\n')
    assert len(records.read(path)) == 2
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: b/c is .*, not a number"):
        records.read_metrics(path)


SAMPLE = {"kind": "heldout", "prompt": "1+1=", "completion": "2", "score": 1.0}


@pytest.mark.parametrize("field", SAMPLE)
def test_a_sample_without_a_field_is_an_error_with_its_line(path, field):
    write(path, (0, {**SAMPLE, "length": 1}))
    assert records.read_samples(path) == [{"step": 0, **SAMPLE, "length": 1}]
    write(path, (1, {name: value for name, value in SAMPLE.items() if name != field}))
    with pytest.raises(ValueError, match=rf"jsonl:2: the sample lacks {field}: each has texts"):
        records.read_samples(path)
    path.write_text("")
    write(path, (1, {**SAMPLE, field: [3]}))
    with pytest.raises(ValueError, match=rf"jsonl:1: the sample has {field} \[3\]: each"):
        records.read_samples(path)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        records.replace(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_replace_on_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        records.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
