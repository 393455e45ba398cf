"""Periodic detection on the records of running processes, or over the network: alarms, hooks."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from jrl.faults.collect.fleet import Alarm, Aligned, Detector, Fleet, Process, Report, align
from jrl.faults.collect.record import Follower
from jrl.faults.collect.vocabulary import PRIORITY, Cause
from jrl.faults.outlier import OutlierDetector
from jrl.faults.remote.exporters import (
    Sorted,
    assemble,
    describe_ignored,
    is_ignored,
    sort_series,
    without_rare,
)
from jrl.faults.remote.machines import machine_of
from jrl.faults.remote.prometheus import SampleSource, Store
from jrl.faults.remote.series import Series
from jrl.faults.standard import SILENCE, SilenceDetector, StandardDetector

RECORD_SECONDS = 1800.0
"""Length of the record of a detection pass. It includes enough of both phases of a job that
alternates between rollouts and training, see `jrl.faults.pauses`."""
MIN_MACHINES = 3
"""Minimum for a comparison: of two machines that differ, either may be the faulty one."""
HISTORY = 120.0
"""Seconds before the record of a network source for which samples are kept: a counter that reads 0
once is recognised by what it was before."""
HOOK_TIMEOUT = 300.0
"""Timeout of a command in seconds, after which it is killed."""
Hook = Callable[[Alarm], object]


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """Settings of the detector on a command line."""

    detector: Literal["standard", "outlier", "minder"] = "standard"
    """Detector of the faulty machine: standard, as in training, looks for errors, silence, a step
    time that is off by a factor and a shift in any metric; outlier only for the third, minder is
    the paper's method."""
    window: float = 8.0
    """Seconds of samples per window; minder's windows are 8 samples."""
    continuity: float = 240.0
    """Seconds for which one machine has to stand out before an alarm names it."""
    threshold: float | None = None
    """Distance from the others that counts as a fault; by default the detector's. For outlier in
    spreads of the others (4 is a factor of at least 2.2), for standard a shift in spreads of
    healthy machines, for minder in their distances from each other."""
    models: str | None = None
    """File of denoising models for minder, as python -m jrl.faults train writes it; by default the
    package's."""
    metrics: tuple[str, ...] = ()
    """Metrics to compare, the most telling first; the first that names a machine ends the search.
    By default all for standard, step/time and cpu/process for outlier, Minder's production metrics
    too for minder."""
    xid: tuple[Cause, ...] = ("machine",)
    """Causes of XID errors that raise an alarm, for standard: some of machine, program and unknown.
    The others are reported in a note."""
    machine_label: str | None = None
    """Label that names the machine of a series; by default the first of machine, node, instance and
    Hostname that it has."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Metrics that outlier and minder compare, by any of their names."""
        default = PRIORITY if self.detector == "minder" else OutlierDetector.metrics
        return self.metrics or default

    def make_detector(self) -> Detector:
        """The detector.

        Raises:
          ValueError: for models without the detector that uses them, and for invalid settings.
        """
        if self.models is not None and self.detector != "minder":
            raise ValueError(
                f"models={self.models!r} needs --detector minder: give it, or leave it out."
            )
        if self.detector == "outlier":
            threshold = self._threshold_or(OutlierDetector.threshold)
            return OutlierDetector(self.compared, self.window, self.continuity, threshold)
        if self.detector == "standard":
            return StandardDetector(
                self.continuity,
                self._threshold_or(StandardDetector.threshold),
                window=self.window,
                metrics=self.metrics,
                codes=self.xid,
            )
        # With JAX and the models, which take seconds to load.
        from jrl.faults.minder import detect, vae

        method = detect.per_metric
        if self.models is not None:
            method = partial(method, models=vae.load_models(self.models))
        return detect.Minder(
            self._threshold_or(detect.Minder.threshold),
            self.continuity,
            priority=self.compared,
            method=method,
        )

    def _threshold_or(self, default: float | int) -> float | int:
        return default if self.threshold is None else self.threshold


@dataclass(frozen=True)
class DetectionPass:
    """Result of one detection pass over the records.

    Attributes:
      fleet: the machines with samples; of `Watcher` only the running ones, from the time when all
        of them have samples.
      processes: state of all machines.
      alarms: the current ones.
      raised: alarms of machines that had none in the previous pass.
      unreadable: one line for each file or address that cannot be read.
      notes: what could not be compared and why, one line each.
      comparable: true if anything was compared.
      health: cost and coverage of the pass itself, in words.
    """

    fleet: Fleet
    processes: tuple[Process, ...]
    alarms: tuple[Alarm, ...]
    raised: tuple[Alarm, ...]
    unreadable: tuple[str, ...]
    notes: tuple[str, ...] = ()
    comparable: bool = True
    health: str = ""

    @property
    def ended(self) -> bool:
        """True if there are processes and all of them have ended cleanly."""
        return bool(self.processes) and all(each.state == "ended" for each in self.processes)


class AlarmTracker:
    """Runs a detector at each pass, and tracks which machines are newly alarmed.

    Args:
      detector: names the outlier machines; one with `examine` also lists what it cannot compare.
      acknowledged: known faulty machines, read at each pass. They are left out of the comparison,
        so that another can be named, and raise no alarm.
    """

    def __init__(
        self, detector: Detector, acknowledged: Callable[[], Collection[str]] | None = None
    ):
        self._detector = detector
        self._acknowledged: Callable[[], Collection[str]] = acknowledged or tuple
        self._alarmed: set[str] = set()

    def update(
        self, fleet: Fleet, others: Sequence[Alarm] = ()
    ) -> tuple[Report, tuple[Alarm, ...]]:
        """The report on a fleet, with the alarms of `others` at its end, and the alarms of machines
        that had none at the last call."""
        acknowledged = set(self._acknowledged())
        rows = [row for row, name in enumerate(fleet.machines) if name not in acknowledged]
        names = tuple(fleet.machines[row] for row in rows)
        compared = replace(fleet, machines=names, values=fleet.values[rows])
        report = examine(compared, self._detector)
        alarms = [*report.alarms, *(each for each in others if each.machine not in acknowledged)]
        raised = tuple(alarm for alarm in alarms if alarm.machine not in self._alarmed)
        self._alarmed = {alarm.machine for alarm in alarms}
        return replace(report, alarms=alarms), raised


class Watcher:
    """Compares the processes that write into some folders.

    Args:
      folders: folders of records by name: machine M of folder N is called N/M. A single folder may
        have an empty name.
      detector: names the outlier machines.
      seconds: length of the compared record.
      silence_timeout: a process that has no sample for so many seconds raises an alarm, if it had
        samples after the youngest running process started; None never.
      acknowledged: see `AlarmTracker`.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        detector: Detector,
        *,
        seconds: float | int = RECORD_SECONDS,
        silence_timeout: float | int | None = 60.0,
        acknowledged: Callable[[], Collection[str]] | None = None,
    ):
        # Twice the ticks: a clock that was set back writes some seconds twice.
        rows = 2 * math.ceil(seconds)
        self._followers = {name: Follower(folder, rows) for name, folder in folders.items()}
        self._tracker = AlarmTracker(detector, acknowledged)
        self._seconds, self._timeout = seconds, silence_timeout
        paths = ", ".join(str(folder) for folder in folders.values())
        self._no_sample_note = (
            f"no sample yet in {paths}: a run started with --faults writes one a second"
        )

    def detect(self, now: float | None = None) -> DetectionPass:
        """Reads new samples and compares; `now` is Unix time, the present by default."""
        started = time.monotonic()
        now = time.time() if now is None else now
        records, unreadable = [], []
        for name, follower in self._followers.items():
            folder_records, errors = follower.read()
            prefix = f"{name}/" if name else ""
            records += [replace(each, machine=prefix + each.machine) for each in folder_records]
            unreadable += errors
        aligned = align(records, now=now, seconds=self._seconds)
        fleet = trim_to_common_start(aligned.fleet)
        report, raised = self._tracker.update(fleet, self._silent(aligned, records, now))
        read = sum(follower.bytes_read for follower in self._followers.values())
        health = (
            f"{len(fleet.machines)} of {len(aligned.processes)} processes are running, read "
            f"{read / 1024:.0f} KiB in {time.monotonic() - started:.2f} s"
        )
        return DetectionPass(
            fleet,
            aligned.processes,
            tuple(report.alarms),
            raised,
            tuple(unreadable),
            report.notes if has_samples(aligned.processes) else (self._no_sample_note,),
            report.comparable,
            health,
        )

    def _silent(self, aligned: Aligned, records: Sequence, now: float) -> list[Alarm]:
        """Alarms for processes that ran together with the present ones and stopped uncleanly."""
        running = set(aligned.fleet.machines)
        start_times = [record.begun for record in records if record.machine in running]
        if self._timeout is None or not start_times:
            return []
        return [
            Alarm(each.machine, SILENCE, now - each.age, now, {"seconds": float(each.age)})
            for each in aligned.processes
            if each.state == "silent"
            and each.age >= self._timeout
            and now - each.age > max(start_times)
        ]


class RemoteWatcher:
    """Compares the machines of a source: a Prometheus server, or exporters' pages.

    Args:
      source: source of the samples.
      detector: names the outlier machines.
      seconds: length of the compared record.
      silence: a machine that has no sample for so many seconds is called silent.
      label: names the machine, see `build_fleet`.
      requested: names of exporters that are compared although they are unknown.
      acknowledged: see `AlarmTracker`.
    """

    def __init__(
        self,
        source: SampleSource,
        detector: Detector,
        *,
        seconds: float | int = RECORD_SECONDS,
        silence: float | int = 60.0,
        label: str | None = None,
        requested: Collection[str] = (),
        acknowledged: Callable[[], Collection[str]] | None = None,
    ):
        self._store = Store(source, seconds + HISTORY)
        self._tracker = AlarmTracker(detector, acknowledged)
        self._seconds, self._silence, self._label = seconds, silence, label
        self._requested = requested

    def detect(self, now: float | None = None) -> DetectionPass:
        """Polls for new samples and compares; `now` is Unix time, the present by default."""
        started = time.monotonic()
        now = time.time() if now is None else now
        series, problems = self._store.update(now)
        named, nameless = self._with_machine(series)
        parts = sort_series(named, label=self._label, requested=self._requested)
        fleet, notes = self._assemble(parts)
        absent = {name: t for name, t in parts.unanswered.items() if name not in fleet.machines}
        report, raised = self._tracker.update(fleet, self._unanswered(fleet, absent, now))
        processes = [self._process_state(fleet, row, now) for row in range(len(fleet.machines))]
        processes += [Process(name, "", "no answer", math.nan, 0, 0, 0) for name in sorted(absent)]
        health = (
            f"{len(parts.series)} series of {len(fleet.machines)} machines every "
            f"{fleet.period:g} s, asked in {time.monotonic() - started:.2f} s"
        )
        notes = (*nameless, *notes, *describe_ignored(series, self._requested))
        if parts.series:
            notes += report.notes
        else:
            notes += (
                f"no sample of the last {self._seconds:g} s was received: no machine is watched",
            )
        return DetectionPass(
            fleet,
            tuple(processes),
            tuple(report.alarms),
            raised,
            tuple(problems),
            notes,
            report.comparable,
            health,
        )

    def _with_machine(self, series: Sequence[Series]) -> tuple[list[Series], list[str]]:
        """The series that can be sorted, and a line for those that name no machine or metric."""
        named, problems = [], {}
        for each in series:
            name = each.labels.get("__name__", "")
            try:
                if not name:
                    raise ValueError("a series has no label '__name__'.")
                if not is_ignored(name, self._requested):
                    machine_of(each.labels, self._label)
                named.append(each)
            except ValueError as error:
                problems.setdefault(name, f"{name or 'a metric without a name'}: {error}")
        return named, [f"{line} Left out." for line in problems.values()]

    def _assemble(self, parts: Sorted) -> tuple[Fleet, list[str]]:
        """The fleet, and what is wrong with the series: no exporter's answer ends the watch."""
        notes = []
        for attempt in (parts, without_rare(parts)):
            try:
                return assemble(attempt).last(self._seconds), [*notes, *attempt.notes]
            except ValueError as error:
                notes = [str(error)]
        return Fleet((), (), 0.0), notes

    def _unanswered(self, fleet: Fleet, absent: Mapping[str, float], now: float) -> list[Alarm]:
        """Alarms for machines that have no sample and have not answered for long, while others
        do."""
        if len(absent) >= len(fleet.machines):
            return []
        least = max(self._silence, SilenceDetector.seconds)
        return [
            Alarm(name, SILENCE, since, now, {"seconds": now - since})
            for name, since in sorted(absent.items())
            if now - since >= least
        ]

    def _process_state(self, fleet: Fleet, row: int, now: float) -> Process:
        seen = np.flatnonzero(np.isfinite(fleet.values[row]).any(axis=0))
        age = now - float(fleet.times[seen[-1]]) if seen.size else math.nan
        late = not age <= max(self._silence, 3 * fleet.period)
        state = "silent" if late else "running"
        return Process(fleet.machines[row], "", state, age, damaged=0, torn=0, future=0)


def has_samples(processes: Sequence[Process]) -> bool:
    """True if any process has a sample."""
    return not all(math.isnan(each.age) for each in processes)


def examine(fleet: Fleet, detector: Detector) -> Report:
    """Report of a detector; one without `examine` compares a fleet of `MIN_MACHINES`."""
    of_detector = getattr(detector, "examine", None)
    if of_detector is not None:
        return of_detector(fleet)
    return Report(detector(fleet), comparable=len(fleet.machines) >= MIN_MACHINES)


def trim_to_common_start(fleet: Fleet) -> Fleet:
    """The fleet from the time on at which every machine has had a sample.

    Machines that have no sample are ignored.
    """
    has_sample = np.isfinite(fleet.values).sum(axis=1) > 0
    first_samples = [int(np.flatnonzero(row)[0]) for row in has_sample if row.any()]
    return fleet.last((fleet.num_samples - max(first_samples, default=0)) * fleet.period)


def command_hook(command: str, timeout: float | int = HOOK_TIMEOUT) -> Hook:
    """Returns a function that runs a shell command and reports a failure on standard error.

    The command receives the alarm in its environment: ``JRL_FAULT_MACHINE``, ``JRL_FAULT_METRIC``,
    ``JRL_FAULT_START`` and ``JRL_FAULT_END`` (Unix times in seconds), and ``JRL_FAULT_LINE``, all
    of it in words. Put the names in double quotes there.

    Raises:
      ValueError: on an empty command.
    """
    if not command.strip():
        raise ValueError("on_fault is an empty command: leave it out, or give the command to run.")

    def run(alarm: Alarm) -> int:
        environment = {
            **os.environ,
            "JRL_FAULT_MACHINE": alarm.machine,
            "JRL_FAULT_METRIC": alarm.metric,
            "JRL_FAULT_START": f"{alarm.start:.3f}",
            "JRL_FAULT_END": f"{alarm.end:.3f}",
            "JRL_FAULT_LINE": alarm.describe(),
        }
        try:
            status = subprocess.run(
                command, shell=True, env=environment, timeout=timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124  # as timeout(1) returns it
        except (OSError, ValueError) as error:  # a name that no environment can hold
            print(f"on-fault command cannot be started: {error}", file=sys.stderr)
            status = 126  # as a shell returns it
        if status:
            print(f"on-fault command ended with status {status}: {command}", file=sys.stderr)
        return status

    return run
