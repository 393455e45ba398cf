"""Counters that must not move: errors that a machine reports about itself."""

from collections.abc import Mapping

import numpy as np

from jrl.faults.collect.vocabulary import is_error_rate, is_fatal
from jrl.faults.fleet import Alarm, Fleet


def moved_counters(fleet: Fleet) -> list[Alarm]:
    """Machines on which a counter of fatal errors moved: uncorrectable ECC, XID, a link that went.

    It names at once, without waiting and without a comparison. Where the counter moved on more than
    half of the machines, one of them made the others fail, and the first is named.
    """
    alarms: list[Alarm] = []
    for column, metric in enumerate(fleet.metrics):
        if not is_fatal(metric):
            continue
        found = []
        for row, machine in enumerate(fleet.machines):
            values = fleet.values[row, column]
            at = np.flatnonzero(np.isfinite(values))
            steps = np.diff(values[at])
            # A counter that falls was set back; the code of an error may be smaller than the last.
            moves = np.flatnonzero((steps != 0) & (values[at][1:] > 0))
            if moves.size and (steps[moves[0]] > 0 or metric.endswith("xid")):
                first = int(at[moves[0] + 1])
                time = fleet.start + first * fleet.period
                evidence: dict[str, np.ndarray | float | int] = {
                    "before": float(values[at][moves[0]]),
                    "after": float(values[first]),
                }
                found.append(Alarm(machine, metric, time, fleet.end, evidence))
        found.sort(key=lambda alarm: alarm.start)
        alarms += found[:1] if 2 * len(found) > len(fleet.machines) else found
    return sorted(alarms, key=lambda alarm: alarm.start)


def error_rates(fleet: Fleet, machine: str) -> Mapping[str, float]:
    """The rates of corrected errors and throttling that one machine alone or nearly alone shows.

    They are no alarm, for healthy machines correct errors as well, but they say where to look.
    """
    found = {}
    row = fleet.machines.index(machine)
    for column, metric in enumerate(fleet.metrics):
        if is_error_rate(metric):
            known = np.isfinite(fleet.values[:, column])
            count = np.maximum(known.sum(axis=1), 1)
            means = np.where(known, fleet.values[:, column], 0).sum(axis=1) / count
            if means[row] > 0 and means[row] > 3 * np.median(means):
                found[metric] = float(means[row])
    return found
