"""Trains in a folder, and kills itself with SIGKILL at a moment that is asked for.

    python killed_run.py FOLDER RECIPE[:MAX_STALENESS] MOMENT NUMBER DELAY

MOMENT is what happens for the NUMBER-th time, and DELAY the seconds from there to the kill: 0
kills on the spot, more kills from another thread while the run goes on. A "write" of a checkpoint,
which has a thread of its own, does not go on until the kill.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)  # as the tests have: what they compile is the same

from small_runs import begin_or_go_on, small_recipe, small_run, small_setup  # noqa: E402

from jrl.rollout.decoding.engine import Engine  # noqa: E402
from jrl.runs import checkpoints  # noqa: E402
from jrl.runs.checkpoints import Checkpoints  # noqa: E402
from jrl.runs.records import Appender  # noqa: E402
from jrl.trainer import loop  # noqa: E402
from jrl.trainer.learner import update as of_update  # noqa: E402

MOMENTS = {
    "warm start": (of_update, "update"),
    "step": (loop, "train_step"),
    "window": (Engine, "poll"),
    "line": (Appender, "append"),
    "checkpoint": (Checkpoints, "save"),
    "write": (checkpoints, "_write_host_arrays"),
}


def kill_at(moment: str, number: int, delay: float) -> None:
    """Kills this process `delay` seconds after the `number`-th call of the moment's function
    began."""
    owner, name = MOMENTS[moment]
    function, calls = getattr(owner, name), iter(range(1, 1000))

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args, **kwargs):
        if next(calls) == number:
            if moment == "write":
                time.sleep(delay)
            if delay == 0 or moment == "write":
                kill()
            threading.Timer(delay, kill).start()
        return function(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    folder, recipe, moment, number, delay = sys.argv[1:]
    kill_at(moment, int(number), float(delay))
    recipe, _, bound = recipe.partition(":")
    run = small_run(max_staleness=int(bound), slots=6) if bound else small_run()
    begin_or_go_on(small_setup(small_recipe(recipe), run), Path(folder))
