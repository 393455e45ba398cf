"""Times how long saving a checkpoint holds up a run, beside a save that is waited for.

"held" is the time until `Checkpoints.save` returns, "saved" the time until the checkpoint is on
disk: what a synchronous save would hold up. Each is the median of the rounds, beside the least.
"processor" is the processor time of the calling thread in "held", on which other work of the
machine has little say. The states are those of the default run and arrays of
`--mebibytes` in all, which are saved `--rounds` times after one that is not counted. With `--steps`
the default run also takes as many steps with nothing to write, and as many that begin with a save.
The folder of `--folder` says which disk is measured.

    python benchmarks/checkpoint.py --threads 2 --steps 10
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from moe.config import Model

MEBIBYTE, ARRAYS = 2**20, 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Times how long a checkpoint holds up a run")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--rounds", type=int, default=5, help="measured saves")
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the large state")
    parser.add_argument("--steps", type=int, default=0, help="steps with and without a save")
    parser.add_argument("--folder", type=Path, help="folder to write in; default: the system's")
    parser.add_argument("--smoke", action="store_true", help="a single save at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.mebibytes, arguments.steps = 1, 1, 0
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    import jax

    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.threads} thread(s)")
    print(
        f"{'state':12}{'MiB':>9}{'held ms':>10}{'least':>9}{'processor':>11}{'saved ms':>10}"
        f"{'least':>9}"
    )
    figures = [default_run(arguments), arrays(arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def default_run(arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of the state of `python -m jrl.train` before its first step."""
    import jax

    from jrl.config.run import RunConfig
    from jrl.recipes import Grpo
    from jrl.trainer import state as states
    from jrl.trainer.setup.setup import build_setup
    from jrl.trainer.step import train_step

    setup = build_setup(RunConfig(), Grpo())
    weights = states.init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))
    state = states.init_state(setup.networks, weights, setup.randomness.key("critic"))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        checkpoints, numbers = checkpoints_in(folder), count()

        def save() -> None:
            numbered = replace(state, step=jax.numpy.int32(next(numbers)))
            states.save(checkpoints, setup.networks, jax.block_until_ready(numbered))

        figures = measure("default run", size, save, checkpoints.wait, arguments.rounds)
        sampler = setup.sampler()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * (arguments.steps + 1) if arguments.steps else 0):
            saves = number % 2 == 1
            started = time.perf_counter()
            if saves:
                save()
            state, _ = train_step(sampler, setup.networks, state, setup.randomness)
            jax.block_until_ready(state)
            if number > 1:  # the first are compiled
                seconds[saves].append(time.perf_counter() - started)
            checkpoints.wait()
    if arguments.steps:
        figures["step_ms"], figures["step_with_save_ms"] = (
            1e3 * statistics.median(seconds[saves]) for saves in (False, True)
        )
        print(
            f"a step takes {figures['step_ms']:.0f} ms, and with a save at its beginning "
            f"{figures['step_with_save_ms']:.0f} ms"
        )
    return figures


def arrays(arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of random arrays of float32, which compress as badly as weights."""
    import jax

    shape = arguments.mebibytes * MEBIBYTE // (4 * ARRAYS * 1024), 1024
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {str(i): jax.random.normal(keys[i], shape) for i in range(ARRAYS)}
    jax.block_until_ready(state)
    size = sum(leaf.nbytes for leaf in state.values())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        checkpoints, numbers = checkpoints_in(folder), count()
        return measure(
            "arrays",
            size,
            lambda: checkpoints.save(next(numbers), state),
            checkpoints.wait,
            arguments.rounds,
        )


def checkpoints_in(folder: str) -> Any:
    from jrl.runs.checkpoints import Checkpoints

    return Checkpoints(Path(folder) / "checkpoints", keep=1)


def measure(
    name: str, size: int, save: Callable[[], None], wait: Callable[[], None], rounds: int
) -> dict[str, Any]:
    """Milliseconds until a save returns, and until it is on disk: median and least."""
    held, processor, saved = [], [], []
    for _ in range(rounds + 1):
        started, started_thread = time.perf_counter(), time.thread_time()
        save()
        held.append(time.perf_counter() - started)
        processor.append(time.thread_time() - started_thread)
        wait()
        saved.append(time.perf_counter() - started)
    figures: dict[str, Any] = {"state": name, "bytes": size}
    for what, seconds in (("held", held), ("processor", processor), ("saved", saved)):
        figures[f"{what}_ms"] = 1e3 * statistics.median(seconds[1:])
        figures[f"{what}_least_ms"] = 1e3 * min(seconds[1:])
    print(
        f"{name:12}{size / MEBIBYTE:9.1f}{figures['held_ms']:10.1f}"
        f"{figures['held_least_ms']:9.1f}{figures['processor_ms']:11.1f}{figures['saved_ms']:10.1f}"
        f"{figures['saved_least_ms']:9.1f}",
        flush=True,
    )
    return figures


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
