"""Provenance of a checkpoint: the settings and files of its run when it was saved.

A run resumes only with the settings, the tokenizer, the records of its data files and the lines of
metrics and samples of its checkpoint, and a policy is read only with its own tokenizer. This
detects files that are damaged, changed or of another run.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jrl.checks import flag
from jrl.processes.agreement import RaiseInAllProcesses, is_main_process
from jrl.runs import records
from jrl.runs.directory import open_directory
from jrl.runs.folder import RunFolder

if TYPE_CHECKING:
    from jrl.runs.checkpoints import Checkpoints  # with Orbax, which takes seconds to load

Fingerprints = Mapping[str, Mapping[str, Any]]
"""Fingerprint of each list of records of a task (`jrl.tasks.data.fingerprint`)."""
NO_FILE = records.offset_of(b"")
"""Hash of a file that does not exist."""
META = "meta/metadata"
"""File of a checkpoint with its `meta`, as Orbax writes JSON."""


def describe(settings: Mapping[str, Any], data: Fingerprints, folder: RunFolder) -> dict[str, Any]:
    """Run metadata for a checkpoint, as JSON values: the settings that a run keeps
    (`jrl.config.files.fixed_settings`), fingerprints of its data, and hashes of files and lines.
    Empty in all processes but the first, which writes it."""
    if not is_main_process():
        return {}
    return {
        "settings": dict(settings),
        "data": dict(data),
        "files": folder.file_hashes(),
        "lines": folder.line_offsets(),
    }


def find_resume_step(checkpoints: "Checkpoints") -> int | None:
    """Step of the latest valid checkpoint, to resume from; None if there is no checkpoint,
    ValueError if all are damaged. Later ones that are damaged are set aside, each with a
    warning."""
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
    settings: Mapping[str, Any],
    data: Fingerprints,
    folder: RunFolder,
    step: int,
    saved: Mapping[str, Any],
) -> None:
    """Drops the lines after a checkpoint, which its run writes again. Raises ValueError, dropping
    nothing, if settings, data or files differ from `saved`, the result of `describe` at the
    checkpoint."""
    with RaiseInAllProcesses():
        if is_main_process():
            check_data(data, folder, step, saved)
            _check_settings(settings, folder, step, saved["settings"])
            folder.check_files(step, saved["files"])
            folder.rewind(step, saved["lines"])


def recorded_files(folder: RunFolder) -> tuple[int, Mapping[str, Any]]:
    """Step of the newest checkpoint, and the hashes of the run's files that it has; 0 and none if
    no checkpoint is readable. It needs no device, and does not verify the checkpoint."""
    steps = open_directory(folder.checkpoints_path).steps()
    if not steps:
        return 0, {}
    try:
        saved = json.loads((folder.checkpoints_path / str(steps[-1]) / META).read_bytes())
        return steps[-1], dict(saved["files"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0, {}  # reported when the checkpoint is restored


def check_files(folder: RunFolder, step: int, saved: Mapping[str, Any]) -> None:
    """Rejects a policy whose tokenizer or network description differs from the saved one."""
    with RaiseInAllProcesses():
        if is_main_process() and "files" in saved:
            folder.check_files(step, saved["files"])


def check_data(data: Fingerprints, folder: RunFolder, step: int, saved: Mapping[str, Any]) -> None:
    """Rejects records that differ from the records of the checkpoint of this step. A checkpoint of
    an earlier version without fingerprints is accepted with a warning."""
    if "data" not in saved:
        if data:
            print(
                f"warning: the checkpoint of step {step} has no fingerprint of its data, so that "
                "a change of the file since then would not be noticed",
                file=sys.stderr,
            )
        return
    changes = [
        f"{name} has {_count(data.get(name))} and had {_count(saved['data'].get(name))} at the "
        f"checkpoint of step {step}"
        for name in {**saved["data"], **data}
        if data.get(name) != saved["data"].get(name)
    ]
    if changes:
        raise ValueError(
            f"{'; '.join(changes)}, and a pass over other records would repeat some and leave out "
            "others: put the file back as it was, or begin a new pass over it in a new run from "
            f"this policy, with --weights {folder.path}"
        )


def same_records(data: Fingerprints, saved: Mapping[str, Any]) -> bool:
    """False if a list of records of the same kind differs from the list of a checkpoint."""
    before: Fingerprints = saved.get("data", {})
    return all(
        before[name] == data[name]
        for name in data
        if name in before and before[name]["kind"] == data[name]["kind"]
    )


def _count(fingerprint: Mapping[str, Any] | None) -> str:
    """Number of records and hash, for a message."""
    if fingerprint is None:
        return "no records"
    return f"{fingerprint['records']:,} {fingerprint['kind']} (hash {fingerprint['hash'][:8]})"


def compare(folder: RunFolder, saved: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Names of the files of a run, each with its difference from `saved`, the result of `describe`
    at a checkpoint; None if it has none. Empty if the checkpoint has no description."""
    if "settings" not in saved:
        return
    config = folder.config()
    current = {"recipe": config.get("recipe")}
    for group in (config.get("run"), config.get("hyperparameters")):
        current |= group if isinstance(group, dict) else {}
    settings = saved["settings"]
    changes = changed_settings(current, settings)
    changes += [f"{flag(name)} is missing" for name in settings if name not in current]
    yield folder.config_path.name, "; ".join(changes) or None
    hashes, saved_hashes = folder.file_hashes(), saved.get("files", {})
    for name in sorted(hashes.keys() | saved_hashes.keys()):
        there, before = hashes.get(name, NO_FILE), saved_hashes.get(name, NO_FILE)
        if there != before:
            yield name, "added" if before == NO_FILE else "changed"
        elif there != NO_FILE:
            yield name, None
    for name, offset in saved.get("lines", {}).items():
        unchanged = records.begins_with(folder.path / name, offset)
        yield name, None if unchanged else "changed in its first lines"


def _check_settings(
    current: Mapping[str, Any], folder: RunFolder, step: int, saved: Mapping[str, Any]
) -> None:
    if differences := changed_settings(current, saved):
        raise ValueError(
            f"{folder.config_path} is not what it was at the checkpoint of step {step}: "
            f"{'; '.join(differences)}. Put the file back as it was, or start a new run from this "
            f"policy with --weights {folder.path}"
        )


def changed_settings(current: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The settings that differ from those saved, each with both values."""
    return [
        f"{flag(name)} is {current[name]!r} and was {saved[name]!r}"
        for name in current
        if name in saved and current[name] != saved[name]
    ]
