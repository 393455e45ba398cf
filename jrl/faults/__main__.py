"""``python -m jrl.faults watch | replay | benchmark``: each a function in a file of its own."""

import importlib
import sys
from collections.abc import Callable, Sequence

from jrl.trainer.command_line import exit_status

COMMANDS = {
    "watch": "look at a run that is going on, and name the process that stands out",
}
"""Each is the module ``jrl.faults.NAME``, whose ``main(arguments)`` returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m jrl.faults COMMAND [OPTIONS]\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items()))
        print("\nEach has its own: python -m jrl.faults watch --help")
        return 0
    if name not in COMMANDS:
        raise ValueError(f"command {name!r} is unknown: choose among {', '.join(COMMANDS)}.")
    # A command imports what it needs: watching a run should not wait for JAX.
    command: Callable[[list[str]], int] = importlib.import_module(f"jrl.faults.{name}").main
    return command(rest)


if __name__ == "__main__":
    sys.exit(main())
