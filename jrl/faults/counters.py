"""Error counters and error codes that a machine reports about itself."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from jrl.faults.collect.error_codes import ErrorCode, error_code
from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.faults.collect.vocabulary import is_code, is_error_rate, is_fatal

MAX_NAMED = 4


def moved_counters(fleet: Fleet, causes: Collection[str] = ("machine",)) -> list[Alarm]:
    """Alarms for machines on which a counter of fatal errors increased or an error code changed.

    Such are uncorrectable ECC errors, XIDs and links that went down. The alarms are raised
    immediately, without a comparison of machines. If a metric changed on more than half of the
    machines, one of them made the others fail, and only the first is named. An error code names its
    machine if its cause is one of `causes`; `other_codes` lists the rest.
    """
    alarms: list[Alarm] = []
    for column, metric in enumerate(fleet.metrics):
        if not is_fatal(metric):
            continue
        increased = []
        for row in range(len(fleet.machines)):
            first = next(_alarms(fleet, row, column, causes), None)
            increased += [] if first is None else [first]
        increased.sort(key=lambda alarm: alarm.start)
        alarms += increased[:1] if 2 * len(increased) > len(fleet.machines) else increased
    return sorted(alarms, key=lambda alarm: alarm.start)


def other_codes(fleet: Fleet, causes: Collection[str] = ("machine",)) -> list[str]:
    """Lines of text, one for each error code that occurred and names no machine."""
    machines_by_code: defaultdict[ErrorCode, list[str]] = defaultdict(list)
    for column, metric in enumerate(fleet.metrics):
        if is_code(metric):
            for row, machine in enumerate(fleet.machines):
                for index, _ in _moves(fleet, row, column):
                    code = error_code(fleet.values[row, column, index])
                    if not _names_machine(code, causes) and machine not in machines_by_code[code]:
                        machines_by_code[code].append(machine)
    return [
        f"{code.describe()} on {_list_machines(machines)}: no machine is named for it."
        for code, machines in machines_by_code.items()
        if machines
    ]


def _alarms(fleet: Fleet, row: int, column: int, causes: Collection[str]) -> Iterator[Alarm]:
    """Alarms of one machine, one for each increase of a counter or change of an error code."""
    machine, metric = fleet.machines[row], fleet.metrics[column]
    for index, last in _moves(fleet, row, column):
        before, after = (float(fleet.values[row, column, each]) for each in (last, index))
        time = fleet.start + index * fleet.period
        if is_code(metric):
            code = error_code(after)
            if _names_machine(code, causes):
                evidence: dict[str, np.ndarray | float | int] = {"code before": before}
                yield Alarm(machine, metric, time, fleet.end, evidence, cause=code.describe())
        elif after > before:
            yield Alarm(machine, metric, time, fleet.end, {"before": before, "after": after})


def _moves(fleet: Fleet, row: int, column: int) -> Iterator[tuple[int, int]]:
    """Indices of each sample that is positive and differs from its predecessor, and of that one."""
    values = fleet.values[row, column]
    finite = np.flatnonzero(np.isfinite(values))
    # A counter that decreases was reset; an error code may be smaller than the last one.
    moved = np.flatnonzero((np.diff(values[finite]) != 0) & (values[finite][1:] > 0))
    for index in moved.tolist():
        yield int(finite[index + 1]), int(finite[index])


def _names_machine(code: ErrorCode, causes: Collection[str]) -> bool:
    return code.cause in causes and not code.handled


def _list_machines(machines: list[str]) -> str:
    if len(machines) <= MAX_NAMED:
        return ", ".join(machines)
    return f"{len(machines)} machines"


def blank_notes(fleet: Fleet) -> list[str]:
    """Lines of text, one for each metric with readings by which exporters report "no value"."""
    machines_by_metric: defaultdict[str, list[str]] = defaultdict(list)
    for machine, metric in sorted(fleet.blank):
        if machine in fleet.machines and metric in fleet.metrics:
            machines_by_metric[metric].append(machine)
    return [
        f"metric {metric!r} of {_list_machines(machines)} has invalid readings: left out."
        for metric, machines in machines_by_metric.items()
    ]


def error_rates(fleet: Fleet, machine: str) -> Mapping[str, float]:
    """Rates of corrected errors and throttling above three times the median over all machines.

    They raise no alarm, as healthy machines correct errors as well, but they help the diagnosis.
    """
    rates = {}
    row = fleet.machines.index(machine)
    for column, metric in enumerate(fleet.metrics):
        if is_error_rate(metric):
            finite = np.isfinite(fleet.values[:, column])
            count = np.maximum(finite.sum(axis=1), 1)
            means = np.where(finite, fleet.values[:, column], 0).sum(axis=1) / count
            if means[row] > 0 and means[row] > 3 * np.median(means):
                rates[metric] = float(means[row])
    return rates
