"""Two processes save a checkpoint together, each its part, while both go on."""

import json
import os
import socket
import subprocess
import sys

import pytest
from bucket import bucket
from places import ROOT, SUPPORT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Results of two processes that save together, and their standard error."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    folder = tmp_path_factory.mktemp("saved")
    command = [sys.executable, str(SUPPORT / "saving_process.py"), port]
    with bucket() as address:
        processes = [
            subprocess.Popen(
                [*command, number, str(folder), f"{address}/together"],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in ("0", "1")
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-3000:]
    return [json.loads((folder / f"{number}.json").read_text()) for number in (0, 1)], errors


def test_shared_save_has_the_state_of_the_call(saved):
    for results in saved[0]:
        assert results["steps"] == [2, 3]
        assert results["same 2"] == results["same 3"] == [True, True, True]


def test_the_state_is_in_a_bucket_too(saved):
    reason = "meta/metadata has 2 bytes instead of 11"
    for results in saved[0]:
        assert results["same in bucket"] == [True, True, True]
        assert results["in bucket"] == [1, {"2": reason}]


@pytest.mark.parametrize(
    ("name", "reason", "step"),
    [("full", "File too large", 4), ("unreadable", "Input/output error", 5)],
)
def test_full_disk_of_one_process_fails_both(saved, name, reason, step):
    first, second = (results[name] for results in saved[0])
    assert second.startswith("StorageError: ") and f"/checkpoints: {reason}: " in second
    assert second.endswith(
        f"The checkpoint of step {step} was not written, that of step {step - 1} stays intact."
    )
    assert first == f"ProcessFailed: process 1: {second.removeprefix('StorageError: ')}"


def test_the_next_save_is_complete(saved):
    for results in saved[0]:
        assert results["again"] == "nothing" and results["intact"] == [4, {}]


def test_an_error_of_one_does_not_wait_for_the_other(saved):
    results, errors = saved
    assert [result["left"] for result in results] == ["KeyError", "ProcessFailed"]
    line = "warning: the last checkpoint was not completed: process 1 was not waited for"
    assert line in errors[0]
