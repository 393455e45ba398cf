"""Judge of a run that met faults: it equals the undisturbed run, and asked each prompt once."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from campaign.faults.attempt import End
from campaign.faults.settings import ROWS, STEPS
from jrl.report.metrics import without_timings
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.records import read, read_metrics


def difference(run: Path, undisturbed: Path) -> str | None:
    """First difference between two finished runs, in a line; None where they are equal bit for
    bit: metrics without times, prompts and completions, and all arrays of the last checkpoint."""
    samples = [read(folder / "samples.jsonl") for folder in (run, undisturbed)]
    return (
        _metrics_difference(*(read_metrics(each / "metrics.jsonl") for each in (run, undisturbed)))
        or prompts_difference(*map(prompts_of, samples))
        or (None if samples[0] == samples[1] else "samples.jsonl has other completions")
        or _state_difference(state_of(run), state_of(undisturbed))
    )


def _metrics_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str | None:
    steps = [[line["step"] for line in lines] for lines in (found, expected)]
    if steps[0] != steps[1]:
        return f"metrics.jsonl has the steps {steps[0]}"
    for line, other in zip(found, expected, strict=True):
        ours, theirs = without_timings(line), without_timings(other)
        for name in sorted(ours.keys() | theirs.keys()):
            # As texts, in which not-a-numbers are equal.
            if repr(ours.get(name)) != repr(theirs.get(name)):
                values = f"{ours.get(name)} instead of {theirs.get(name)}"
                return f"{name} of step {line['step']} is {values}"
    return None


def prompts_of(samples: Sequence[dict[str, Any]]) -> dict[int, list[str]]:
    """Prompts of the training completions by step, in their order."""
    steps: dict[int, list[str]] = {}
    for sample in samples:
        if sample["kind"] == "training":
            steps.setdefault(sample["step"], []).append(sample["prompt"])
    return steps


def prompts_difference(found: dict[int, list[str]], expected: dict[int, list[str]]) -> str | None:
    """Prompts that were lost or asked more than once, in a line; None without any."""
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert all(len(prompts) == ROWS for prompts in expected.values())
    for step, prompts in expected.items():
        ours, theirs = Counter(found.get(step, [])), Counter(prompts)
        if ours != theirs:
            lost, more = list((theirs - ours).elements()), list((ours - theirs).elements())
            return f"step {step} lost the prompts {lost} and has {more} too many"
    return None


def state_of(run: Path) -> dict[str, np.ndarray]:
    """Arrays of the newest checkpoint by name: weights, optimizer, keys, prompts."""
    checkpoints = Checkpoints(run / "checkpoints")
    step, items = checkpoints._find(None)

    def like(description: dict[str, Any]) -> Any:
        if "impl" in description:
            key = jax.random.key(0, impl=description["impl"])
            return jax.ShapeDtypeStruct(tuple(description["shape"]), key.dtype)
        return np.zeros(description["shape"], description["dtype"])

    state, _ = checkpoints.restore(step, {name: like(d) for name, d in items["tree"].items()})
    return {
        name: np.asarray(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else leaf)
        for name, leaf in state.items()
    }


def _state_difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    if found.keys() != expected.keys():
        return f"the last checkpoint has other arrays: {sorted(found.keys() ^ expected.keys())}"
    for name, array in found.items():
        if array.dtype != expected[name].dtype or array.tobytes() != expected[name].tobytes():
            return f"{name} of the last checkpoint differs"
    return None


def wrong_ends(
    ends: Sequence[End], struck: set[int], finished: set[int], is_watched: bool
) -> str | None:
    """Reason why processes did not end as they should after a fault; None if they did.

    Each ends by itself; those that were not struck with a status that is no success and one line
    of an error; JAX may have said it where process 0 is lost.

    Args:
      ends: of all processes.
      struck: processes that were killed or stopped.
      finished: processes that had nothing left to do.
      is_watched: false while processes start, when they may wait longer for each other.
    """
    for number, end in enumerate(ends):
        said = " | ".join(end.lines) or "nothing"
        if any(line.startswith("Traceback") for line in end.lines):
            return f"process {number} ended with a traceback: {said}"
        if not end.by_itself and is_watched:
            return f"process {number} did not end by itself: {said}"
        if number in struck or number in finished or not end.by_itself:
            continue
        if end.is_by_jax and len(end.errors) <= 1 and number > 0:
            continue
        if end.status not in (1, 2) or len(end.errors) != 1:
            return f"process {number} ended with status {end.status} and said: {said}"
    return None
