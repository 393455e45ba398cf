"""The training program, one process of which a thread keeps busy: a fault that is really there.

    python -m drained_training FLAGS...

Steps of the four processes are paced, so that they leave room on two cores. Process SICK of them
computes without need while there is a file `sick` in the working directory. The detector is the
run's own, over shorter times.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path

import command_runs  # noqa: F401, the micro model

from jrl import train
from jrl.faults import standard
from jrl.trainer import loop

SICK = 2
"""Index of the process, among four of them."""
STEP_SECONDS = 0.5
BUSY, PERIOD = 0.15, 0.25
"""Seconds of computation in each period of the fault."""
CONTINUITY, PAST, THRESHOLD = 30.0, 30.0, 10.0
"""Seconds of a shift and of what has to be before it, and its spreads: the fault's are dozens, and
other programs on the same cores make a few."""
WINDOWS = {"window": 10.0, "hop": 2.0, "recent": 30.0}

train_step = loop.train_step


def paced_step(*arguments, **options):
    """A training step that lasts `STEP_SECONDS` at least."""
    begun = time.monotonic()
    result = train_step(*arguments, **options)
    time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - begun)))
    return result


def keep_busy():
    while True:
        begun = time.monotonic()
        if Path("sick").exists():
            while time.monotonic() - begun < BUSY:
                pass
        time.sleep(max(0.0, PERIOD - (time.monotonic() - begun)))


def main(words):
    standard.MIN_SHIFT_CONTINUITY = CONTINUITY
    standard.ShiftDetector = partial(standard.ShiftDetector, **WINDOWS)
    loop.StandardDetector = partial(standard.StandardDetector, past=PAST, threshold=THRESHOLD)
    count, index = (words[words.index(name) + 1] for name in ("--num-processes", "--process-id"))
    if int(count) == 4:
        loop.train_step = paced_step
        if int(index) == SICK:
            threading.Thread(target=keep_busy, daemon=True).start()
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
