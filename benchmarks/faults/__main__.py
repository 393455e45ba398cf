"""``python -m benchmarks.faults COMMAND``: runs the function `main` of the file of a command."""

import argparse
import sys
from collections.abc import Callable, Sequence

import jax

from jrl.command_line import exit_status

COMMANDS = {
    "benchmark": "measure how often the detector, a baseline and ablations name the right machine",
    "sliding": "measure false alarms per day and recall of the looks that watch makes",
    "synchronous": "measure recall and false alarms on fleets of synchronous training",
    "simulate": "write a simulated fleet, with a fault or without, to replay",
    "train": "train the denoising models of the package on simulated fleets",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        usage="%(prog)s COMMAND [OPTIONS]",
        description="\n".join(f"{name:<12} {purpose}" for name, purpose in COMMANDS.items()),
        epilog="Each has its own options: python -m benchmarks.faults sliding --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command")
    name = parser.parse_args(arguments[:1] or ["--help"]).command
    if name not in COMMANDS:
        raise ValueError(f"command {name!r} is unknown: choose among {', '.join(COMMANDS)}.")
    if name != "train":
        # Detectors run on a CPU, as beside a training run.
        jax.config.update("jax_platforms", "cpu")
    return _load(name)(arguments[1:])


def _load(name: str) -> Callable[[list[str]], int]:
    """The function of a command; imports only what that command needs."""
    match name:
        case "benchmark":
            from benchmarks.faults.benchmark import main
        case "sliding":
            from benchmarks.faults.sliding import main
        case "synchronous":
            from benchmarks.faults.looks import main
        case "simulate":
            from benchmarks.faults.simulate.incident import main
        case _:
            from benchmarks.faults.models import main
    return main


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
