"""Wall time and memory of a run."""

import os
from types import SimpleNamespace

import jax
import pytest

from jrl.runs.records import Appender
from jrl.trainer import resources
from jrl.trainer.resources import DEVICE_MEMORY, MINUTES, PROCESS_MEMORY, Resources


def test_minutes_continue_after_the_last_line(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(resources, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = Resources()
    now[0] += 90.0
    assert found.metrics()[MINUTES] == 1.5
    with Appender(tmp_path / "metrics.jsonl") as lines:
        lines.append(0, {MINUTES: 1.0})
        lines.append(1, {MINUTES: 20.0})
    found.resume(tmp_path / "metrics.jsonl")
    assert found.metrics()[MINUTES] == 21.5
    with Appender(tmp_path / "earlier.jsonl") as lines:
        lines.append(0, {})  # of a version that kept no minutes
    found.resume(tmp_path / "earlier.jsonl")
    assert found.metrics()[MINUTES] == 1.5


def test_memory_of_process_and_devices(monkeypatch):
    assert DEVICE_MEMORY not in Resources().metrics()  # a CPU says nothing
    peaks = [3 * 2**30, 5 * 2**30, None]
    devices = [
        SimpleNamespace(memory_stats=lambda p=peak: p and {"peak_bytes_in_use": p})
        for peak in peaks
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert Resources().metrics()[DEVICE_MEMORY] == 5.0


@pytest.mark.parametrize("content", [None, "", "12", "12 x 3"])
def test_resident_memory_is_left_out_where_the_system_says_none(content, tmp_path, monkeypatch):
    if content is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/statm").write_text(content)
    assert resources.resident_memory(tmp_path) is None
    monkeypatch.setattr(resources, "resident_memory", lambda: None)
    assert PROCESS_MEMORY not in Resources().metrics()


def test_resident_memory_counts_pages(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text("900 25 8 1 0 300 0\n")
    assert resources.resident_memory(tmp_path) == 25 * os.sysconf("SC_PAGE_SIZE")
