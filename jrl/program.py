"""Name of a command in help and messages, as the user started the process."""

import sys
from pathlib import PurePath


def program(command: str) -> str:
    """The name of a command, to be typed again: ``jrl train`` in a process of the script `jrl`,
    ``python -m jrl train`` in one of that module, else ``python -m jrl.train``.

    Args:
      command: with its subcommand, for example "faults watch".
    """
    started = PurePath(sys.argv[0])
    if started.stem == "jrl":
        return f"jrl {command}"
    if started.parts[-2:] == ("jrl", "__main__.py"):
        return f"python -m jrl {command}"
    return f"python -m jrl.{command}"
