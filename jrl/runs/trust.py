"""Trust in the code of run folders.

A run folder has Python files (its recipe, tasks and rewards), and its settings name modules and a
shell command: the work of whoever wrote the folder. They run only if the user has given the same
code to a command before, gives it again, or trusts the folder by a flag.

The code that a user has given is recorded by its SHA-256, an empty file each, in
``$XDG_STATE_HOME/jrl/code`` (~/.local/state if it is not set).
"""

import os
import sys
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path

TRUST_FLAG = "--trust-run-code"


def remember(code: Mapping[str, bytes]) -> None:
    """Records code that the user has given; a warning tells if that is not possible.

    Args:
      code: contents of files, and texts that name modules or commands, by their names.
    """
    if not code:
        return
    try:
        folder = _record_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for content in code.values():
            (folder / sha256(content).hexdigest()).touch()
    except (OSError, RuntimeError) as error:  # RuntimeError for a user who has no home folder
        print(
            f"warning: the code of this run ({', '.join(code)}) cannot be recorded as yours "
            f"({error}): --resume and jrl.evaluate will need {TRUST_FLAG}",
            file=sys.stderr,
        )


def check_trusted(run: Path, code: Mapping[str, bytes], named: Collection[bytes] = ()) -> None:
    """Raises ValueError unless the user has given all of the code of a run folder before.

    Args:
      code: as of `remember`.
      named: code that the user gives in this command.
    """
    unknown = [
        f"{name} (sha256 {sha256(content).hexdigest()[:12]})"
        for name, content in code.items()
        if content not in named and not _is_recorded(content)
    ]
    if unknown:
        raise ValueError(
            f"run {run} has code that you have not given to a command on this machine: "
            f"{', '.join(unknown)}. It would run as your user: read it, then give {TRUST_FLAG}."
        )


def _is_recorded(content: bytes) -> bool:
    try:
        return (_record_folder() / sha256(content).hexdigest()).is_file()
    except (OSError, RuntimeError):
        return False


def _record_folder() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(root) / "jrl" / "code"
