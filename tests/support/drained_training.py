"""The training program of a run that can be watched: with three processes its steps are paced.

    python -m drained_training FLAGS...

The watcher is the run's own, but names a silent process after `SILENT_SECONDS`.
"""

import sys
import time
from functools import partial

import command_runs  # noqa: F401, the micro model

from jrl import train
from jrl.faults import guard
from jrl.trainer import loop

STEP_SECONDS = 0.5
SILENT_SECONDS = 20.0

train_step = loop.train_step


def paced_step(*arguments, **options):
    """A training step that lasts `STEP_SECONDS` at least."""
    begun = time.monotonic()
    result = train_step(*arguments, **options)
    time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - begun)))
    return result


def main(words):
    guard.Watcher = partial(guard.Watcher, silence_timeout=SILENT_SECONDS)
    if words[words.index("--num-processes") + 1] == "3":
        loop.train_step = paced_step
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
