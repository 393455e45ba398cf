"""Scoring of alarms: outcome of one incident, and figures over incidents with their intervals.

An incident in which the first alarm names the machine that failed, for a time that overlaps the
fault, is found. An alarm that names another machine, or that machine at another time, is wrong, and
the incident is missed as well. The paper does not say how it counts wrong names; counting them
twice is the strictest reading.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jrl.faults.collect.fleet import Alarm
from jrl.faults.simulate import Incident

DETECTED, WRONG, SILENT = "found", "wrong", "silent"


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


def figures(outcomes: Sequence[str], *, resamples: int = 2000, seed: int = 0) -> Figures:
    """``precision = found / (found + wrong)``, ``recall = found / all``, F1 their harmonic mean.

    Intervals are percentiles over bootstrap resamples of the incidents. A precision without alarms
    is 0.
    """
    kinds = np.array([[o == DETECTED, o == WRONG] for o in outcomes], float).reshape(-1, 2)
    if len(kinds) == 0:
        raise ValueError("outcomes is empty: give at least one incident.")
    random = np.random.default_rng(seed)
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


def operational_precision(
    recall: float | int,
    wrong: float | int,
    per_pass: float | int,
    *,
    passes: float | int,
    faults: float | int = 2,
) -> float:
    """Share of the alarms an operator receives that are right.

    ``f r / (f (r + w) + l a)`` with f faults a day, of which r are found and w give a wrong name,
    and l detection passes a day over a healthy fleet, each a false alarm with probability a.
    Minder's fleet had two faults a day.
    """
    right = faults * recall
    total = right + faults * wrong + passes * per_pass
    return right / total if total > 0 else 0.0
