"""``python -m jrl.launch LAUNCHER [OPTIONS] -- ARGUMENTS``: training on many machines.

ARGUMENTS are arguments of ``python -m jrl.train``, for example ``--layout "tp2 dp4"``.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jrl.checks import check_range, flag
from jrl.command_line import exit_status
from jrl.launch import jobset, ray_cluster, slurm, ssh_hosts
from jrl.launch.program import Program, prepare
from jrl.program import program as program_name

SEPARATOR = "--"
RESTARTS = 3
PORT = 7733

PARSER = argparse.ArgumentParser(
    usage="%(prog)s (--hosts A,B | --ray [ADDRESS] | --slurm [FILE] | --jobset [FILE]) [OPTIONS] "
    "-- ARGUMENTS",
    description="Starts one training run on many machines. What follows -- are the arguments of "
    "jrl train, the same for every launcher.",
    allow_abbrev=False,
)
_launchers = PARSER.add_argument_group("launchers").add_mutually_exclusive_group(required=True)
_launchers.add_argument(
    "--hosts", metavar="A,B,C", help="over ssh, one process on each of these hosts"
)
_RAY = "on a Ray cluster; without ADDRESS that of RAY_ADDRESS, or one on this machine alone"
for _name, _default, _metavar, _help in (
    ("--ray", "", "ADDRESS", _RAY),
    ("--slurm", "run.sbatch", "FILE", "write an sbatch file (default: run.sbatch)"),
    ("--jobset", "jobset.yaml", "FILE", "write a JobSet for Kubernetes (default: jobset.yaml)"),
):
    _launchers.add_argument(_name, nargs="?", const=_default, metavar=_metavar, help=_help)


def _option(name: str, of: Sequence[str], help_text: str, **settings: object) -> None:
    """Adds an option of some launchers; the others reject it."""
    dest = name.removeprefix("--").replace("-", "_")
    OPTIONS[dest] = tuple(of)
    launchers = ", ".join(f"--{each}" for each in of)
    PARSER.add_argument(name, help=f"{help_text} ({launchers})", **settings)  # pyright: ignore[reportArgumentType]


OPTIONS: dict[str, tuple[str, ...]] = {}
"""Launchers of each option."""
NUMBER = {"type": int, "metavar": "N"}
_option("--nodes", ("slurm", "jobset"), "machines of the run", **NUMBER)
_option("--workers", ("ray",), "processes; default one for each node with accelerators", **NUMBER)
_option("--gpus", ("slurm", "jobset"), "GPUs of each node", **NUMBER)
_option("--chips", ("jobset",), "TPU chips of each node", **NUMBER)
_option("--topology", ("ray", "jobset"), "of a TPU slice, such as 4x4", metavar="AxB")
_option(
    "--accelerator-type",
    ("ray", "jobset"),
    "of a TPU slice: TPU-V6E for Ray, tpu-v6e-slice for GKE",
    metavar="TYPE",
)
_option(
    "--max-failures",
    ("ray", "slurm", "jobset"),
    f"restarts from the last checkpoint after a failure, default {RESTARTS}",
    **NUMBER,
)
_option(
    "--elastic",
    ("hosts", "ray", "slurm"),
    "fewest machines with which the run continues: over ssh after a drain, else after their loss",
    type=int,
    metavar="MIN",
)
_option("--port", ("hosts", "jobset"), f"of the coordinator, default {PORT}", **NUMBER)
_option(
    "--env",
    ("hosts", "slurm", "jobset", "ray"),
    "environment variable of the processes, may be repeated",
    metavar="NAME=VALUE",
    action="append",
)
_option(
    "--sbatch",
    ("slurm",),
    "further option of sbatch, may be repeated: --sbatch=--time=9:00:00",
    metavar="OPTION",
    action="append",
)
_option("--submit", ("slurm",), "submit the file that was written", action="store_true")
_option("--image", ("jobset",), "container image with jrl", metavar="IMAGE")
_option("--volume", ("jobset",), "volume claim that all pods share", metavar="CLAIM:PATH")
_option("--job-name", ("jobset",), "name of the JobSet, default jrl", metavar="NAME")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    launcher_words, program_words = split_arguments(arguments)
    PARSER.prog = program_name("launch")
    options = PARSER.parse_args(launcher_words)
    launcher = next(
        name for name in ("hosts", "ray", "slurm", "jobset") if getattr(options, name) is not None
    )
    _check(options, launcher)
    environment = _environment(options.env or ())
    max_failures = RESTARTS if options.max_failures is None else options.max_failures
    port = PORT if options.port is None else options.port
    if launcher == "jobset":
        volume = jobset.parse_volume(_required(options, launcher, "volume"))
        job = jobset.JobSet(
            name=options.job_name or "jrl",
            image=_required(options, launcher, "image"),
            nodes=_required(options, launcher, "nodes"),
            volume=volume,
            gpus=options.gpus,
            chips=options.chips,
            accelerator_type=options.accelerator_type,
            topology=options.topology,
            port=port,
            max_failures=max_failures,
            environment=environment,
        )
        # Its files are in the image: only there can the arguments be checked.
        return jobset.write(job, jobset.arguments_of(program_words, volume), Path(options.jobset))
    if options.elastic is not None:
        per_machine = options.gpus or 1  # as Slurm starts them
        program_words += ["--min-processes", str(options.elastic * per_machine)]
    program = prepare(program_words)
    _check_drain(program, launcher, options.elastic)
    if launcher == "hosts":
        names = ssh_hosts.parse_hosts(options.hosts)
        if options.elastic is not None and options.elastic >= len(names):
            raise ValueError(
                f"elastic={options.elastic} leaves none of {len(names)} hosts to drain: lower it."
            )
        return ssh_hosts.launch(program, ssh_hosts.Hosts(names, port, environment))
    if launcher == "slurm":
        nodes = _required(options, launcher, "nodes")
        job = slurm.SlurmJob(
            nodes, options.gpus, max_failures, options.sbatch or (), environment, options.elastic
        )
        return slurm.write(program, job, Path(options.slurm), options.submit)
    return ray_cluster.launch(
        program,
        ray_cluster.RayOptions(
            address=options.ray or None,
            workers=options.workers,
            elastic=options.elastic,
            max_failures=max_failures,
            topology=options.topology,
            accelerator_type=options.accelerator_type,
            environment=environment,
        ),
    )


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's arguments, and the training program's, which follow ``--``."""
    if SEPARATOR not in arguments:
        return arguments, []
    index = arguments.index(SEPARATOR)
    return arguments[:index], arguments[index + 1 :]


def _check(options: argparse.Namespace, launcher: str) -> None:
    """Rejects options of another launcher, and numbers that cannot be."""
    for name, launchers in OPTIONS.items():
        value = getattr(options, name)
        if value is None or value is False:
            continue
        if launcher not in launchers:
            raise ValueError(
                f"{flag(name)} is of {' and '.join(f'--{each}' for each in launchers)}, and has no "
                f"meaning with --{launcher}: leave it out."
            )
        if isinstance(value, int):
            check_range(options, (name,), 0 if name == "max_failures" else 1)


def _check_drain(program: Program, launcher: str, elastic: int | None) -> None:
    """Rejects drains if the restart would not leave out their machine, and restarts that lack a
    drain."""
    if launcher != "hosts":
        if program.drains:
            raise ValueError(
                f"on_fault='drain' is not supported with --{launcher}, which would restart the run "
                "on the same machines: use --hosts with --elastic, or a command as --on-fault that "
                "takes the machine out of service."
            )
    elif program.drains and elastic is None:
        raise ValueError(
            "on_fault='drain' needs --elastic MIN before --, the fewest hosts to continue with."
        )
    elif elastic is not None and not program.drains:
        raise ValueError(
            f"elastic={elastic} needs --faults --on-fault drain after --: with --hosts only a "
            "drained run is started again."
        )


def _required(options: argparse.Namespace, launcher: str, name: str) -> Any:
    value = getattr(options, name)
    if value is None:
        raise ValueError(f"--{launcher} needs --{name}; see {program_name('launch')} --help.")
    return value


def _environment(settings: Sequence[str]) -> dict[str, str]:
    for setting in settings:
        if not re.match(r"[A-Za-z_]\w*=", setting):
            raise ValueError(f"env={setting!r} must be NAME=VALUE.")
    return dict(setting.split("=", 1) for setting in settings)


if __name__ == "__main__":
    sys.exit(main())
