"""Refusals of a file system are one line."""

import errno
import logging
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.runs import checkpoints as module
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.storage import LOGGERS, StorageError, errno_of, quiet, writing

LATE = "Event loop is closed"
"""Of writes that cannot say to their save that they have ended."""


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (
            ValueError(f"RESOURCE_EXHAUSTED: {os.strerror(errno.EMFILE)} [OS error 24]"),
            errno.EMFILE,
        ),
        (ValueError("a step that is not newer"), None),
        (OSError(errno.ENOENT, "No such file or directory"), None),
    ],
)
def test_storage_separates_refusals_from_faults(error, number):
    assert errno_of(error) == number
    wrapped = RuntimeError("a thread failed")
    wrapped.__cause__ = error
    assert errno_of(wrapped) == number


def test_storage_keeps_programming_errors(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path, ""):
        raise KeyError("leaf")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    state = {"x": np.arange(3)}
    checkpoints.save(1, state)

    checkpoints.wait()

    def full(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")

    monkeypatch.setattr(module, "_write_host_arrays", full)
    for then in (checkpoints.wait, lambda: checkpoints.save(3, state), checkpoints.close):
        checkpoints.save(2, state)
        with pytest.raises(StorageError, match=r"No space left.*free space.*step 1 stays intact"):
            then()
        checkpoints.wait()  # said once
    assert checkpoints.latest_valid_step()[0] == 1
    monkeypatch.undo()
    checkpoints.save(2, state)
    checkpoints.close()
    assert [entry.name for entry in sorted(checkpoints.directory.iterdir())] == ["1", "2"]


def test_writes_that_end_after_a_failed_save_say_nothing(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: heard.append(unraisable))
    late, other = (SimpleNamespace(exc_value=RuntimeError(text)) for text in (LATE, "another"))
    with quiet:
        with pytest.raises(StorageError), writing(tmp_path, ""):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sys.unraisablehook(other)
    for unraisable in (late, other):
        sys.unraisablehook(unraisable)
    assert heard == [other]


def test_threads_that_fail_after_a_failed_save_log_nothing(tmp_path, monkeypatch, caplog):
    logger = logging.getLogger("absl")
    for each in LOGGERS:
        monkeypatch.setattr(each, "filters", [])
    with pytest.raises(StorageError), writing(tmp_path, ""):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    logger.error("[thread=array_type_handler] _SignalingThread.run() raised an exception: %s", "x")
    logger.error("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


def test_a_run_folder_that_is_gone_does_not_come_back(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, {"x": np.arange(3)})
    checkpoints.wait()
    shutil.rmtree(folder)
    with pytest.raises(
        StorageError, match="run no longer exists: the checkpoint of step 2 cannot be written"
    ):
        checkpoints.save(2, {"x": np.arange(3)})
    assert not folder.exists()


def test_folders_above_are_made_where_there_were_none(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "base")
    checkpoints.save(0, {"x": np.arange(3)})
    checkpoints.wait()
    assert checkpoints.latest_step() == 0
