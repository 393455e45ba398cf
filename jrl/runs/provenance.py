"""Provenance of a checkpoint: the settings and files of its run when it was saved.

A run resumes only with the settings, the tokenizer and the lines of metrics and samples of its
checkpoint, and a policy is read only with its own tokenizer. This detects files that are damaged or
come from another run.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jrl.checks import flag
from jrl.processes.agreement import RaiseInAllProcesses, is_main_process
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder


def describe(settings: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Run metadata for a checkpoint, as JSON values: the settings that a run keeps
    (`jrl.config.files.fixed_settings`), and hashes of files and lines. Empty in all processes but
    the first, which writes it."""
    if not is_main_process():
        return {}
    return {
        "settings": dict(settings),
        "files": folder.file_hashes(),
        "lines": folder.line_offsets(),
    }


def find_resume_step(checkpoints: Checkpoints) -> int | None:
    """Step of the latest valid checkpoint, to resume from; None without any checkpoint, ValueError
    if all are damaged. Later ones that are damaged are set aside, each with a warning."""
    step, damaged = checkpoints.latest_valid_step()
    for later, reason in damaged.items():
        path = checkpoints.set_aside(later)
        if is_main_process():
            print(
                f"warning: the checkpoint of step {later} is damaged ({reason}) and was moved to "
                f"{path}; resuming from step {step}",
                file=sys.stderr,
            )
    return step


def rewind(
    settings: Mapping[str, Any], folder: RunFolder, step: int, saved: Mapping[str, Any]
) -> None:
    """Drops the lines after a checkpoint, which its run writes again. Raises ValueError, dropping
    nothing, if settings or files differ from `saved`, the result of `describe` at the
    checkpoint."""
    with RaiseInAllProcesses():
        if is_main_process():
            _check_settings(settings, folder, step, saved["settings"])
            folder.check_files(step, saved["files"])
            folder.rewind(step, saved["lines"])


def check_files(folder: RunFolder, step: int, saved: Mapping[str, Any]) -> None:
    """Rejects a policy whose tokenizer or network description differs from the saved one."""
    with RaiseInAllProcesses():
        if is_main_process() and "files" in saved:
            folder.check_files(step, saved["files"])


def _check_settings(
    current: Mapping[str, Any], folder: RunFolder, step: int, saved: Mapping[str, Any]
) -> None:
    differences = [
        f"{flag(name)} is {current[name]!r} and was {saved[name]!r}"
        for name in current
        if name in saved and current[name] != saved[name]
    ]
    if differences:
        raise ValueError(
            f"{folder.config_path} is not what it was at the checkpoint of step {step}: "
            f"{'; '.join(differences)}. Put the file back as it was, or start a new run from this "
            f"policy with --weights {folder.path}"
        )
