"""``python -m jrl.faults COMMAND``: runs the function `main` of the file of a command."""

import sys
from collections.abc import Callable, Sequence

import jax

from jrl.command_line import exit_status
from jrl.program import program

COMMANDS = {
    "watch": "look at runs that are going on, and name the process that stands out",
    "replay": "look at a recorded fleet: table, picture of the machine that stands out, alarm",
    "train": "train the denoising models on healthy records",
}
SIMULATING = ("benchmark", "sliding", "simulate")
"""Commands of `python -m benchmarks.faults`: a checkout has them, the package does not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {program('faults')} COMMAND [OPTIONS]\n")
        for name, purpose in COMMANDS.items():
            print(f"  {name:<10} {purpose}")
        print(f"\nEach has its own options: {program('faults watch')} --help")
        return 0
    if name in SIMULATING:
        raise ValueError(
            f"command {name!r} simulates fleets, in a checkout: "
            f"run python -m benchmarks.faults {name}."
        )
    if name not in COMMANDS:
        raise ValueError(f"command {name!r} is unknown: choose among {', '.join(COMMANDS)}.")
    if name != "train":
        # A watcher beside a training run must not allocate memory on its accelerator.
        jax.config.update("jax_platforms", "cpu")
    return _load(name)(rest)


def _load(name: str) -> Callable[[list[str]], int]:
    """The function of a command; imports only what that command needs."""
    match name:
        case "watch":
            from jrl.faults.watch import main
        case "replay":
            from jrl.faults.replay import main
        case _:
            from jrl.faults.minder.train import main
    return main


if __name__ == "__main__":
    sys.exit(main())
