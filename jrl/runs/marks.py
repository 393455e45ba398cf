"""File offsets of a run at a checkpoint, and the check that the files still match them.

A mark is the length and the SHA-256 of a file of `jrl.runs.records` at that moment. The run resumes
from the checkpoint with exactly these bytes; later lines are written again.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from jrl.runs import records

Mark = dict[str, Any]


def mark(path: Path) -> Mark:
    """Length and SHA-256 of a file, synced first: the checkpoint must not outlive its lines."""
    if not path.exists():
        return _of(b"")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _of(file.read())


def go_back(path: Path, mark: Mark, step: int, *, every_step: bool) -> None:
    """Cuts the file back to a mark in one atomic replacement.

    Args:
      path: the file; it may be missing only where it was at the mark.
      step: of the checkpoint that has the mark, for the message.
      every_step: whether the file has one line for each step from 0 on; otherwise a step may have
        several lines or none.

    Raises:
      ValueError: where it does not begin with what it held at the mark, naming the first line that
        shows it; the file is then untouched.
    """
    content = path.read_bytes() if path.exists() else b""
    marked = content[: mark["bytes"]]
    if _of(marked) == mark:
        if len(content) > len(marked):
            records.replace(path, marked)
        return
    if not path.exists():
        why = " is missing"
    else:
        why = _fault(content, step, every_step) or (
            f": the first {mark['bytes']} bytes were changed, or are those of another run"
        )
    raise ValueError(
        f"{path}{why}; the checkpoint of step {step} goes on after the lines that were written up "
        "to it, in order and unchanged. Put the file back as it was, or begin a new run from this "
        f"policy with --weights {path.parent}"
    )


def _of(content: bytes) -> Mark:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _fault(content: bytes, step: int, every_step: bool) -> str | None:
    """First fault of the lines up to a step, judged without the mark; None without any."""
    before = -1
    *lines, _ = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = records.record_of(line)
        if record is None:
            return f":{number} is not a JSON object with an integer step"
        found = record["step"]
        if every_step and found != before + 1:
            return f":{number} is of step {found} where step {before + 1} belongs"
        if found < before:
            return f":{number} is of step {found} after one of step {before}"
        if found > step or (every_step and found == step):
            return None
        before = found
    if every_step:
        return f" ends with line {len(lines)}, before the one of step {before + 1}"
    return None
