"""Launch over Slurm: an sbatch file that starts the run with srun, and puts it back into the queue.

Slurm does so by itself when a node fails or a job of higher priority takes it; the file also does
it before the time limit, for which the run saves first, and after a failure of the run.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jrl.launch.program import MODULE, Program

SAVE_SECONDS = 300
"""Seconds before the time limit at which the run is asked to save and end."""


@dataclass(frozen=True)
class SlurmJob:
    """Settings of a Slurm job: options of ``python -m jrl.launch --slurm``.

    Attributes:
      gpus: of each node, each for a process of its own; None is one process for each node.
      directives: further options of sbatch, for example --partition=a100 or --time=24:00:00.
      environment: variables of the processes.
      elastic: fewest machines with which the job is started, at first and after the loss of some;
        None waits for all.
    """

    nodes: int
    gpus: int | None = None
    max_failures: int = 3
    directives: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    elastic: int | None = None


def sbatch_text(program: Program, job: SlurmJob) -> str:
    """Contents of the sbatch file."""
    tasks = 1 if job.gpus is None else job.gpus
    nodes = str(job.nodes) if job.elastic is None else f"{job.elastic}-{job.nodes}"
    options = [
        f"--job-name={program.run_dir.name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks}",
        *([] if job.gpus is None else [f"--gpus-per-node={job.gpus}"]),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{SAVE_SECONDS}",
        *job.directives,
    ]
    exports = "".join(f"export {n}={shlex.quote(v)}\n" for n, v in job.environment.items())
    command = shlex.join([sys.executable, "-m", MODULE, "--coordinator", "auto"])
    return (
        "#!/bin/bash\n"
        + "".join(f"#SBATCH {option}\n" for option in options)
        + f"""
cd {shlex.quote(str(Path.cwd()))} || exit 2
{exports}
# Before the time limit: the run saves and ends, and the job goes back into the queue. The signal
# goes to the processes of the run; srun itself would kill them.
out_of_time=
trap 'out_of_time=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --kill-on-bad-exit=1 {command} \\
    {shlex.join(program.arguments)} &
run=$!
wait "$run"
status=$?
if [ "$out_of_time" ]; then # the wait ended with the signal, not with the run
    wait "$run"
    status=$?
    [ "$status" = 0 ] && exec scontrol requeue "$SLURM_JOB_ID"
fi
# Status 2 is wrong input, which no restart mends.
if [ "$status" != 0 ] && [ "$status" != 2 ] && \\
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_failures} ]; then
    echo "the run ended with status $status: restarting it from its last checkpoint" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
    )


def write(program: Program, job: SlurmJob, path: Path, submit: bool) -> int:
    """Writes the sbatch file, submits it on request, and returns the exit status; ValueError for a
    job that cannot be, or where sbatch is missing."""
    if job.elastic is not None and job.elastic > job.nodes:
        raise ValueError(f"elastic={job.elastic} is more than nodes={job.nodes}: lower it.")
    for directive in job.directives:
        if not directive.startswith("-") or "\n" in directive:
            raise ValueError(
                f"sbatch={directive!r} must be an option of sbatch: --sbatch=--time=9."
            )
    path.write_text(sbatch_text(program, job))
    if not submit:
        print(f"wrote {path}; submit it with: sbatch {path}")
        return 0
    try:
        return subprocess.run(["sbatch", str(path)], check=False).returncode
    except FileNotFoundError:
        raise ValueError(
            f"--submit needs the command sbatch, which this machine lacks: {path} is written; "
            "submit it on a login node of the cluster."
        ) from None
