"""File offsets of a run at a checkpoint, and the check that the files still match them.

An offset is the length and the SHA-256 of a file of `jrl.runs.records` at that moment. The run
resumes from the checkpoint with exactly these bytes; later lines are written again.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from jrl.runs import records

FileOffset = dict[str, Any]


def read_offset(path: Path) -> FileOffset:
    """Length and SHA-256 of a file, synced first: the checkpoint must not outlive its lines."""
    if not path.exists():
        return _offset_of(b"")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _offset_of(file.read())


def truncate(path: Path, offset: FileOffset, step: int, *, every_step: bool) -> None:
    """Cuts the file back to an offset in one atomic replacement.

    Args:
      path: the file; it may be missing only where it was at the offset.
      step: of the checkpoint that has the offset, for the message.
      every_step: whether the file has one line for each step from 0 on; otherwise a step may have
        several lines or none.

    Raises:
      ValueError: where it does not begin with what it held at the offset, naming the first line
        that shows it; the file is then untouched.
    """
    content = path.read_bytes() if path.exists() else b""
    prefix = content[: offset["bytes"]]
    if _offset_of(prefix) == offset:
        if len(content) > len(prefix):
            records.replace(path, prefix)
        return
    if not path.exists():
        reason = " is missing"
    else:
        reason = _first_fault(content, step, every_step) or (
            f": the first {offset['bytes']} bytes were changed, or are those of another run"
        )
    raise ValueError(
        f"{path}{reason}; the checkpoint of step {step} continues after the lines that were "
        "written up to it, in order and unchanged. Put the file back as it was, or start a new "
        f"run from this policy with --weights {path.parent}"
    )


def _offset_of(content: bytes) -> FileOffset:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _first_fault(content: bytes, step: int, every_step: bool) -> str | None:
    """First fault of the lines up to a step, judged without the offset; None without any."""
    previous_step = -1
    *lines, _ = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = records.record_of(line)
        if record is None:
            return f":{number} is not a JSON object with an integer step"
        line_step = record["step"]
        if every_step and line_step != previous_step + 1:
            return f":{number} is of step {line_step} where step {previous_step + 1} is expected"
        if line_step < previous_step:
            return f":{number} is of step {line_step} after one of step {previous_step}"
        if line_step > step or (every_step and line_step == step):
            return None
        previous_step = line_step
    if every_step:
        return f" ends with line {len(lines)}, before the one of step {previous_step + 1}"
    return None
