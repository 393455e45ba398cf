"""``python -m jrl.launch LAUNCHER [OPTIONS] -- ARGUMENTS``: training on many machines.

ARGUMENTS are those of ``python -m jrl.train``.
"""

import argparse
import sys
from collections.abc import Sequence

from jrl.command_line import exit_status
from jrl.launch import ray_cluster
from jrl.launch.program import prepare

SEPARATOR = "--"

PARSER = argparse.ArgumentParser(
    prog="python -m jrl.launch",
    usage="%(prog)s --ray [ADDRESS] [OPTIONS] -- ARGUMENTS",
    description="Starts one training run on many machines. What follows -- are the arguments of "
    "python -m jrl.train, the same for every launcher.",
    allow_abbrev=False,
)
LAUNCHERS = PARSER.add_mutually_exclusive_group(required=True)
LAUNCHERS.add_argument(
    "--ray",
    nargs="?",
    const="",
    metavar="ADDRESS",
    help="on a Ray cluster; without ADDRESS that of RAY_ADDRESS, or one on this machine alone",
)
RAY = PARSER.add_argument_group("Ray")
RAY.add_argument(
    "--workers",
    type=int,
    metavar="N",
    help="processes of the run; one for each node with accelerators is the default",
)
RAY.add_argument("--topology", metavar="AxB", help="of a TPU slice, such as 4x4")
RAY.add_argument("--accelerator-type", metavar="TYPE", help="of a TPU slice, such as TPU-V6E")
PARSER.add_argument(
    "--max-failures",
    type=int,
    default=3,
    metavar="N",
    help="restarts from the last checkpoint after a failure (default: 3)",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    launcher_words, program_words = split_arguments(arguments)
    options = PARSER.parse_args(launcher_words)
    for name in ("workers", "max_failures"):
        least = 1 if name == "workers" else 0
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
    return ray_cluster.launch(
        prepare(program_words),
        ray_cluster.RayOptions(
            options.ray or None,
            options.workers,
            options.max_failures,
            options.topology,
            options.accelerator_type,
        ),
    )


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's arguments, and those of the training program, which follow ``--``."""
    if SEPARATOR not in arguments:
        return arguments, []
    index = arguments.index(SEPARATOR)
    return arguments[:index], arguments[index + 1 :]


if __name__ == "__main__":
    sys.exit(main())
