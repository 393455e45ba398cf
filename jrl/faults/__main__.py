"""``python -m jrl.faults COMMAND``: each command is a function in a file of its own."""

import sys
from collections.abc import Sequence

import jax

from jrl.command_line import exit_status


def watch(arguments: list[str]) -> int:
    """look at runs that are going on, and name the process that stands out"""
    from jrl.faults.watch import main

    return main(arguments)


def replay(arguments: list[str]) -> int:
    """look at a recorded fleet: table, picture of the machine that stands out, alarm"""
    from jrl.faults.replay import main

    return main(arguments)


def benchmark(arguments: list[str]) -> int:
    """measure how often the detector, a baseline and ablations name the right machine"""
    from jrl.faults.assess.benchmark import main

    return main(arguments)


def sliding(arguments: list[str]) -> int:
    """measure false alarms per day and recall of the looks that watch makes"""
    from jrl.faults.assess.sliding import main

    return main(arguments)


def simulate(arguments: list[str]) -> int:
    """write a simulated fleet, with a fault or without, to replay"""
    from jrl.faults.simulate.incident import main

    return main(arguments)


def train(arguments: list[str]) -> int:
    """train the denoising models on healthy records"""
    from jrl.faults.assess.train import main

    return main(arguments)


# A command imports what it needs when it is called.
COMMANDS = {
    "watch": watch,
    "replay": replay,
    "benchmark": benchmark,
    "sliding": sliding,
    "simulate": simulate,
    "train": train,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m jrl.faults COMMAND [OPTIONS]\n")
        for name, command in COMMANDS.items():
            print(f"  {name:<10} {command.__doc__}")
        print("\nEach has its own options: python -m jrl.faults watch --help")
        return 0
    if name not in COMMANDS:
        raise ValueError(f"command {name!r} is unknown: choose among {', '.join(COMMANDS)}.")
    if name != "train":
        # A watcher beside a training must not take memory of its accelerator.
        jax.config.update("jax_platforms", "cpu")
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main())
