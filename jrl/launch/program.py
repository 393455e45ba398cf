"""The program that every launcher starts, ``python -m jrl.train``, and its arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jrl.config.flags import parse_arguments
from jrl.faults.settings import DRAIN
from jrl.processes.coordinator import SINGLE_PROCESS
from jrl.runs.folder import RunFolder, next_run_path
from jrl.runs.trust import TRUST_FLAG

MODULE = "jrl.train"


@dataclass(frozen=True)
class Program:
    """Arguments of the training program, the same in all processes and at every restart.

    Attributes:
      arguments: with a run folder, and --resume-if-exists.
      run_dir: the run folder.
      drains: true if an alarm of its fault detector ends it for a restart (--on-fault drain).
    """

    arguments: tuple[str, ...]
    run_dir: Path
    drains: bool = False


def prepare(arguments: Sequence[str]) -> Program:
    """Fixes the run folder; ValueError for arguments that the training program rejects, or that a
    launcher sets."""
    if "--resume-if-exists" in arguments:
        raise ValueError(
            "--resume-if-exists is set by the launcher: give --resume to continue a run."
        )
    options = parse_arguments(list(arguments))
    if options.processes != SINGLE_PROCESS:
        raise ValueError(
            "--coordinator, --num-processes, --process-id and --coordinator-timeout are set by the "
            "launcher: leave them out after --."
        )
    command, words = options.command, [word for word in arguments if word != "--resume"]
    if command.run_dir is not None:
        run_dir = Path(command.run_dir)
    else:
        run_dir = next_run_path(options.recipe.name, options.run.task)
        words += ["--run-dir", str(run_dir)]
    folder = RunFolder(run_dir)
    if not command.resume and folder.config_path.is_file():
        raise ValueError(
            f"run folder {run_dir} already holds a run: continue it with --resume, or name another."
        )
    drains = options.run.on_fault == DRAIN
    # Of the user on this machine; others have no record of the user's code.
    if command.resume and options.code is not None and TRUST_FLAG not in words:
        words += [TRUST_FLAG] if options.code.parts else []
    return Program((*words, "--resume-if-exists"), run_dir, drains)
