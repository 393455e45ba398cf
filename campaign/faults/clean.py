"""Run without a fault that drains faulty machines: in an hour nothing may touch it.

    python -m campaign.faults.clean --processes 4 --minutes 60

All processes train with `--faults --on-fault drain` and default settings of the detector, write
checkpoints and evaluate, until SIGTERM ends them after so many minutes. The run passes if every
process runs until then and ends with status 0, without an alarm, a drain or a warning.
"""

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from campaign.faults.attempt import Attempt, End, Host
from campaign.faults.moments import LIMIT
from campaign.faults.program import MODEL
from campaign.faults.settings import SETTINGS, write_inputs
from jrl.faults.collect.record import read_folder
from jrl.faults.guard import read_drains
from jrl.runs.records import read_metrics

CLEAN_SETTINGS = SETTINGS | {
    "steps": 10**6,
    "samples-every": 100,
    "eval-every": 25,
    "checkpoint-every": 50,
    "on-fault": "drain",
}
REWARD = """
import time

def variety(prompt, completion, answer):
    time.sleep({seconds})
    return len(set(completion))
"""
ALARM = "faults/alarm/"


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
      steps: that it made.
      samples: of the process with the fewest.
      touched: what touched it, one line each.
    """

    steps: int
    samples: int
    touched: list[str]


def train(processes: int, seconds: float, reward_seconds: float, folder: Path) -> Outcome:
    """Trains for so many seconds after the first step.

    Args:
      reward_seconds: that each reward takes; a run that waits for rewards leaves the cores free.
      folder: for everything that the run leaves.

    Raises:
      RuntimeError: if no step ends.
    """
    inputs = write_inputs(folder / "inputs")
    inputs.reward.write_text(REWARD.format(seconds=reward_seconds))
    flags = [
        *(f"--{name}={value}" for name, value in CLEAN_SETTINGS.items()),
        *("--faults", f"--task=jsonl:{inputs.prompts}", f"--reward={inputs.reward}:variety"),
        *(f"--devices={processes}", f"--layout=dp{processes}", f"--run-dir={folder / 'run'}"),
    ]
    attempt = Attempt([Host()] * processes, flags, folder / "output", folder / "cache")
    try:
        if attempt.wait_for(lambda event: event.step == 2, LIMIT) is None:
            raise RuntimeError(f"no step has ended: {attempt.end(0)}")
        attempt.wait(seconds)
        survivors = [process for process in attempt.processes if process.poll() is None]
        for process in survivors:
            process.send_signal(signal.SIGTERM)
        return outcome(folder / "run", attempt.end(LIMIT), len(survivors))
    finally:
        attempt.kill()


def outcome(run: Path, ends: list[End], running: int) -> Outcome:
    """What the run folder and the ends of all processes say.

    Args:
      running: processes that ran until they were to end.
    """
    lines = read_metrics(run / "metrics.jsonl")
    names = sorted({name for line in lines for name in line if name.startswith(ALARM)})
    touched = [f"alarm {name.removeprefix(ALARM)}" for name in names]
    touched += [f"drained process {drain.process}" for drain in read_drains(run)]
    if running < len(ends):
        touched.append(f"{len(ends) - running} of {len(ends)} processes ended early")
    for number, end in enumerate(ends):
        if end.status != 0 or end.lines:
            touched.append(f"process {number}: status {end.status} {' | '.join(end.lines)}")
    records = read_folder(run / "faults")[0]
    samples = min((len(record.times) for record in records), default=0)
    return Outcome(len(lines) - 1, samples, touched)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m campaign.faults.clean",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=4, help="of the run, one device each")
    parser.add_argument("--minutes", type=float, default=60.0, help="from the first step")
    parser.add_argument("--reward-seconds", type=float, default=0.01, help="of each completion")
    parser.add_argument("--keep", type=Path, help="folder in which the run stays")
    options = parser.parse_args(arguments)
    if options.processes < 3:
        parser.error(f"--processes {options.processes}: the detector compares at least 3")
    with ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jrl-clean-")))
        folder.mkdir(parents=True, exist_ok=True)
        found = train(
            options.processes, 60 * options.minutes, options.reward_seconds, folder.absolute()
        )
    print(
        f"{options.processes} processes of {MODEL}, {options.minutes:g} minutes: {found.steps} "
        f"steps, {found.samples} samples of each process; {'; '.join(found.touched) or 'untouched'}"
    )
    return int(bool(found.touched))


if __name__ == "__main__":
    sys.exit(main())
