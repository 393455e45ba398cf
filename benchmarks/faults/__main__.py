"""Recall and false alarms of the default detector on fleets of synchronous training.

    python -m benchmarks.faults --faults 60 --clean 60 --seed 0

Each record is looked at as `watch` does, every minute at the last half hour, and as `replay` does,
once over the whole record. An alarm in a healthy record, or before the fault, or of another machine
is false.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.faults.looks import examine, summary
from benchmarks.faults.synchronous import SLOWDOWNS
from jrl.faults.assess.outcomes import map_in_processes


def main() -> None:
    """Runs the command."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    command.add_argument("--faults", type=int, default=60, help="records of each level")
    command.add_argument("--clean", type=int, default=60, help="records without a fault")
    command.add_argument("--seed", type=int, default=0, help="added to the seeds of all records")
    command.add_argument("--interval", type=float, default=60.0, help="seconds between two looks")
    command.add_argument("--processes", type=int, default=None, help="default: one per core")
    command.add_argument("--out", help="file for the outcome of each record (JSON)")
    request = command.parse_args()
    jobs = [
        (1000 * index + request.seed + i, level)
        for index, level in enumerate((*SLOWDOWNS, None))
        for i in range(request.clean if level is None else request.faults)
    ]
    work = partial(examine, request.interval)
    rows = list(map_in_processes(work, jobs, request.processes))
    print("\n".join(summary(rows)))
    if request.out is not None:
        Path(request.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
