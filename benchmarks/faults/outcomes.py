"""Simulated incidents in parallel processes, the outcome of each, and figures over all of them.

An incident in which the first alarm names the machine that failed, for a time that overlaps the
fault, is found. An alarm that names another machine, or that machine at another time, is wrong, and
the incident is missed as well. The paper does not say how it counts wrong names; counting them
twice is the strictest reading.
"""

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from benchmarks.faults.simulate import Incident
from jrl.faults.collect.fleet import Alarm

DETECTED, WRONG, SILENT = "found", "wrong", "silent"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
Job = TypeVar("Job")
Result = TypeVar("Result")


def outcome(incident: Incident, alarms: Sequence[Alarm]) -> str:
    """`DETECTED`, `WRONG` or `SILENT`; on a clean record an alarm is `WRONG`."""
    if not alarms:
        return SILENT
    alarm = alarms[0]
    is_right_machine = alarm.machine == incident.machine
    overlap = alarm.start < incident.end and alarm.end > incident.start
    return DETECTED if is_right_machine and overlap else WRONG


@dataclass(frozen=True)
class Figures:
    """Precision, recall and F1 of a detector, each with the ends of a 95 % interval."""

    precision: tuple[float, float, float]
    recall: tuple[float, float, float]
    f1: tuple[float, float, float]


def figures(outcomes: Sequence[str], *, resamples: int = 2000) -> Figures:
    """``precision = found / (found + wrong)``, ``recall = found / all``, F1 their harmonic mean.

    Intervals are percentiles over bootstrap resamples of the incidents. A precision without alarms
    is 0.
    """
    kinds = np.array([[o == DETECTED, o == WRONG] for o in outcomes], float).reshape(-1, 2)
    if len(kinds) == 0:
        raise ValueError("outcomes is empty: give at least one incident.")
    random = np.random.default_rng(0)
    resampled = kinds[random.integers(len(kinds), size=(resamples, len(kinds)))].mean(1)
    center = _rates(kinds.mean(0, keepdims=True))[0]
    low, high = np.percentile(_rates(resampled), [2.5, 97.5], axis=0)
    triples = [(float(c), float(a), float(b)) for c, a, b in zip(center, low, high, strict=True)]
    return Figures(*triples)


def _rates(shares: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 3"]:
    detected, wrong = shares.T
    precision = detected / np.maximum(detected + wrong, 1e-12)
    f1 = 2 * detected / (1 + detected + wrong)  # 2 TP / (2 TP + FP + FN), with TP + FN = 1
    return np.stack([precision, detected, f1], 1)


def false_alarm_rate(alarms: int, passes: int) -> tuple[float, float, float]:
    """False alarms per detection pass over a clean record, with Wilson's 95 % interval."""
    z, share = 1.96, alarms / passes
    middle = (share + z**2 / (2 * passes)) / (1 + z**2 / passes)
    half = (
        z * math.sqrt(share * (1 - share) / passes + z**2 / (4 * passes**2)) / (1 + z**2 / passes)
    )
    return share, max(0.0, middle - half), min(1.0, middle + half)


def most_events(count: int) -> float:
    """Upper 95 % bound of the mean of a Poisson distribution of which `count` was seen.

    The mean at which so few or fewer have the probability 0.05: 3.0 for none.
    """
    low, high = 0.0, 10.0 + 4 * count
    while high - low > 1e-6:
        mean = (low + high) / 2
        few = sum(
            math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1)
        )
        low, high = (mean, high) if few > 1 - 0.95 else (low, mean)
    return high


def operational_precision(
    recall: float | int, wrong: float | int, per_pass: float | int, *, passes: float | int
) -> float:
    """Share of the alarms an operator receives that are right.

    ``f r / (f (r + w) + l a)`` with f faults a day, of which r are found and w give a wrong name,
    and l detection passes a day over a healthy fleet, each a false alarm with probability a.
    """
    faults = 2  # a day, as in Minder's fleet
    right = faults * recall
    total = right + faults * wrong + passes * per_pass
    return right / total if total > 0 else 0.0


def map_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], processes: int | None = None
) -> Iterator[Result]:
    """Yields results in the order of the jobs, as they complete; each process has a JAX of its own.

    Threads would share one CPU backend, and computations started from more threads than it has can
    deadlock.

    Args:
      function: a function of a module, or a `partial` of one, for it goes to the processes.
      processes: how many; one works in this process, None takes one per core.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} must be at least 1.")
    count = min(processes or os.cpu_count() or 1, max(1, len(jobs)))
    if count == 1:
        yield from map(function, jobs)
        return
    # A forked process would inherit locks that JAX's threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_one_thread) as pool:
        yield from pool.map(function, jobs)


def _one_thread() -> None:
    """Sets XLA to one thread; called before the first use of JAX, whose backend reads the flag."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()


def complete_rows(
    path: Path,
    settings: dict[str, Any],
    jobs: Sequence[tuple[int, Any]],
    compute: Callable[[list[tuple[int, Any]]], Iterable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Rows of the jobs, in their order; a file has those that an interrupted run has completed.

    The others are appended as they complete. A new file begins with `settings`.

    Args:
      jobs: each begins with its seed, which is in its row too.
      compute: yields the rows of jobs.

    Raises:
      ValueError: where the file begins with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_text() if path.exists() else ""
    first, *lines = content.splitlines() or [json.dumps(settings)]
    if json.loads(first) != settings:
        raise ValueError(
            f"{path} belongs to other settings or thresholds: give another --out, or delete it."
        )
    lines = lines if content.endswith("\n") else lines[:-1]
    path.write_text("\n".join([first, *lines]) + "\n")  # without what a kill has torn
    seen = {row["seed"]: row for row in map(json.loads, lines)}
    with path.open("a") as file:
        for row in compute([job for job in jobs if job[0] not in seen]):
            file.write(json.dumps(row) + "\n")
            file.flush()
            seen[row["seed"]] = row
    return [seen[job[0]] for job in jobs]
