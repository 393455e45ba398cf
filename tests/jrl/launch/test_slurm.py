"""Launch over Slurm: the file, and its script with a `srun` and a `scontrol` on the PATH."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jrl.launch import slurm
from jrl.launch.program import Program
from jrl.launch.slurm import SlurmJob, sbatch_text

PROGRAM = Program(("dapo", "--task", "a b", "--run-dir", "runs/first"), Path("runs/first"))
SRUN = """#!/bin/bash
echo $$ > pid
printf '%s\\n' "$@" > arguments
trap 'echo saved >> arguments; exit 0' TERM
if [ "$SRUN_STATUS" = wait ]; then sleep 30 & wait $!; fi
exit "$SRUN_STATUS"
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 17" ] && kill -TERM "$(cat pid)"
"""
SCONTROL = """#!/bin/bash
echo "$@" > requeued
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.sbatch"
    job = SlurmJob(2, environment={"NCCL_DEBUG": "INFO it's"})
    assert slurm.write(PROGRAM, job, path, submit=False) == 0
    return path


def test_directives():
    job = SlurmJob(4, gpus=8, directives=("--partition=a100", "--time=24:00:00"))
    lines = sbatch_text(PROGRAM, job).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in lines[1:10]] == [
        "--job-name=first",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--partition=a100",
        "--time=24:00:00",
    ]
    with pytest.raises(ValueError, match="must be an option of sbatch"):
        slurm.write(PROGRAM, SlurmJob(1, directives=("time=9",)), Path("x"), submit=False)


@pytest.mark.parametrize(
    ("status", "restarts", "ends", "requeued"),
    [(0, 0, 0, False), (2, 0, 2, False), (1, 0, 0, True), (1, 2, 0, True), (1, 3, 1, False)],
)
def test_a_failure_is_restarted_and_wrong_input_is_not(
    script, status, restarts, ends, requeued, monkeypatch, tmp_path
):
    monkeypatch.setenv("SRUN_STATUS", str(status))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[0] == "--kill-on-bad-exit=1"
    assert arguments[2:6] == ["-m", "jrl.train", "--coordinator", "auto"]
    assert tuple(arguments[6:]) == PROGRAM.arguments


def test_before_the_time_limit_the_run_saves_and_goes_back_into_the_queue(
    script, monkeypatch, tmp_path
):
    monkeypatch.setenv("SRUN_STATUS", "wait")
    process = subprocess.Popen(["bash", str(script)])
    deadline = time.monotonic() + 20
    while not (tmp_path / "arguments").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # until its handler is there
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0
    assert (tmp_path / "arguments").read_text().endswith("saved\n")
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_the_file_is_submitted(script, monkeypatch, tmp_path):
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(ValueError, match="needs the command sbatch"):
            slurm.write(PROGRAM, SlurmJob(1), script, submit=True)
    (tmp_path / "bin" / "sbatch").write_text('#!/bin/sh\necho "$@" > submitted\nexit 4\n')
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    assert slurm.write(PROGRAM, SlurmJob(1), script, submit=True) == 4
    assert (tmp_path / "submitted").read_text() == f"{script}\n"
