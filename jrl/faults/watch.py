"""``python -m jrl.faults watch RUN``: a live table of a run's processes, and the outlier if any.

Multiple runs can be watched as one fleet, when each is one of equal processes. Nothing is written
into their folders.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import INCOMPARABLE, Detector
from jrl.faults.collect.vocabulary import find_recorded
from jrl.faults.remote.exporters import SELECTOR
from jrl.faults.remote.fetch import Limits
from jrl.faults.remote.prometheus import SERVER_LIMITS, Pages, Prometheus, SampleSource
from jrl.faults.settings import DRAIN, TELL
from jrl.faults.watcher import (
    MIN_MACHINES,
    RECORD_SECONDS,
    DetectionPass,
    DetectorOptions,
    RemoteWatcher,
    Watcher,
    command_hook,
    has_samples,
)
from jrl.program import program
from jrl.report.display import visible
from jrl.runs.folder import RunFolder

ALARMED = 3
"""Exit status after an alarm; 1 and 2 are taken by failures and wrong input."""
MAX_SHOWN = 3
"""Metrics in the table, the one of an alarm first."""
STYLES = {"running": "green", "ended": "dim", "no data": "yellow"}


@dataclass(frozen=True)
class WatchOptions(DetectorOptions):
    """Runs or machines to watch, and settings of the detector."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of runs that were started with --faults; none with --prometheus or --scrape."""
    prometheus: str | None = None
    """A Prometheus server to query instead, such as http://localhost:9090."""
    selector: str = SELECTOR
    """The series to query, in PromQL; by default all metrics that are known by name: of DCGM's
    exporter, of node exporter, of cAdvisor and of jrl."""
    scrape: tuple[str, ...] = ()
    """Exporters' pages to fetch instead, such as http://node7:9400/metrics."""
    deadline: float = Limits.seconds
    """Seconds for the whole answer of a server or page, after which it is reported and no longer
    waited for."""
    once: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run one detection pass and exit."""
    until_fault: tyro.conf.FlagCreatePairsOff[bool] = False
    """Stop at the first alarm."""
    seconds: float = RECORD_SECONDS
    """Length of the time window of each detection pass, up to now."""
    silence: float = 60.0
    """Seconds after its last sample from which on a process that did not report its end raises an
    alarm."""
    interval: float | None = None
    """Seconds between two detection passes; by default 1 for runs, 15 for network sources."""
    acknowledged: str | None = None
    """A file of names of acknowledged machines, one per line: they raise no alarm and are not
    compared. It is read in each detection pass."""
    on_fault: str | None = None
    """A shell command for each alarm; its environment has JRL_FAULT_MACHINE, JRL_FAULT_METRIC,
    JRL_FAULT_START, JRL_FAULT_END (Unix times) and JRL_FAULT_LINE."""
    save: str | None = None
    """An .npz file to write the fleet of the last detection pass to, for replay."""


def main(arguments: list[str]) -> int:
    """Watches until all processes have ended, and returns the exit status: 3 after an alarm."""
    request = parse_flags(
        Annotated[WatchOptions, tyro.conf.arg(name="")],
        program("faults watch"),
        arguments,
        "Shows what each process of a run is doing, and names the one that stands out.",
    )
    targets = (bool(request.run), request.prometheus is not None, bool(request.scrape))
    if sum(targets) != 1:
        raise ValueError(
            "give the folder of a run, or --prometheus, or --scrape, one of them: "
            f"{program('faults watch')} RUN"
        )
    interval = request.interval
    if interval is None:
        interval = 1.0 if request.run else 15.0
    if not interval > 0:
        raise ValueError(f"interval={interval} must be above 0 seconds.")
    if not 0 < request.deadline < math.inf:
        raise ValueError(f"deadline={request.deadline} must be a finite number above 0 seconds.")
    watcher = _watcher(request)
    if request.on_fault in (TELL, DRAIN):
        raise ValueError(
            f"on_fault={request.on_fault!r} is an action of a run: give it to {program('train')}, "
            "or a shell command here."
        )
    hook = None if request.on_fault is None else command_hook(request.on_fault)
    alarmed = False
    with _open_screen(Console(), live=not request.once) as show:
        while True:
            result = watcher.detect()
            show(result, request)
            for alarm in result.raised:
                alarmed = True
                if hook is not None:
                    hook(alarm)
            if request.once or result.ended or (alarmed and request.until_fault):
                break
            time.sleep(interval)
    if request.save is not None:
        result.fleet.save(request.save)
    if alarmed:
        return ALARMED
    return 0 if result.comparable or result.ended else INCOMPARABLE


def _watcher(request: WatchOptions) -> Watcher | RemoteWatcher:
    acknowledged = partial(_read_acknowledged, request.acknowledged)
    if request.prometheus is not None or request.scrape:
        return RemoteWatcher(
            _source(request),
            _detector(request),
            seconds=request.seconds,
            silence=request.silence,
            label=request.machine_label,
            requested=request.metrics,
            acknowledged=acknowledged,
        )
    folders = {}
    for path in map(Path, request.run):
        folder = path / "faults"
        if not folder.is_dir():
            folder = RunFolder.read(path).path / "faults"
        if request.once and not folder.is_dir():
            raise ValueError(f"{path} holds no samples: start the run with --faults.")
        name = path.resolve().name if len(request.run) > 1 else ""
        if name in folders:
            raise ValueError(f"two of the runs are called {name!r}: give one of them another name.")
        folders[name] = folder
    return Watcher(
        folders,
        _detector(request),
        seconds=request.seconds,
        silence_timeout=request.silence,
        acknowledged=acknowledged,
    )


def _source(request: WatchOptions) -> SampleSource:
    if request.prometheus is None:
        return Pages(request.scrape, Limits(request.deadline))
    limits = replace(SERVER_LIMITS, seconds=request.deadline)
    return Prometheus(request.prometheus, request.selector, limits)


def _read_acknowledged(path: str | None) -> set[str]:
    """The names in a file; none if there is no file yet."""
    if path is None or not Path(path).exists():
        return set()
    return {line.strip() for line in Path(path).read_text().splitlines() if line.strip()}


def _detector(request: WatchOptions) -> Detector:
    detector = request.make_detector()
    if request.detector != "minder":
        return detector
    return lambda fleet: detector(fleet.select(find_recorded(request.compared, fleet.metrics)))


@contextmanager
def _open_screen(console: Console, live: bool) -> Iterator:
    """A function that shows a detection pass: a table updated in place, or lines of what is new."""
    if live and console.is_terminal:
        with Live(console=console, auto_refresh=False) as screen:
            yield lambda result, request: screen.update(render(result, request), refresh=True)
        return
    if not live:
        yield lambda result, request: console.print(render(result, request))
        return
    states: dict[str, str] = {}
    printed: set[str] = set()
    unreadable: set[str] = set()

    def lines(result: DetectionPass, request: WatchOptions) -> None:
        nonlocal unreadable
        for each in result.processes:
            if states.get(each.machine) != each.state:
                states[each.machine] = each.state
                print(f"{visible(each.machine)}: {each.state}", flush=True)
        for line in sorted(unreadable - {*result.unreadable}):
            print(f"over: {visible(line)}", flush=True)
        for line in result.unreadable:
            if line not in unreadable:
                print(visible(line), flush=True)
        unreadable = {*result.unreadable}
        for line in () if result.ended else result.notes:
            if line not in printed:
                printed.add(line)
                print(visible(line), flush=True)
        for alarm in result.raised:
            print(f"ALARM: {visible(alarm.describe())}", flush=True)

    yield lines


def render(result: DetectionPass, request: WatchOptions) -> RenderableType:
    """The table of all processes, what cannot be read, and the verdict."""
    table = Table(box=box.ROUNDED, title=f"{len(result.processes)} processes")
    for heading in ("process", "host", "state", "last sample", "samples lost"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "state")
    alarms = [alarm.metric for alarm in result.alarms]
    shown = list(find_recorded([*alarms, *request.compared], result.fleet.metrics))[:MAX_SHOWN]
    for name in shown:
        table.add_column(f"{name} (x median)", justify="right")
    recent = _recent_cells(result, shown, request.window)
    alarmed = {alarm.machine for alarm in result.alarms}
    for each in result.processes:
        style = "bold red" if each.machine in alarmed else ""
        lost = each.damaged + each.future + (each.torn > 0)
        table.add_row(
            Text(visible(each.machine), style),
            Text(visible(each.host)),
            Text(each.state, style or STYLES.get(each.state, "red")),
            _format_age(each.age),
            str(lost) if lost else "",
            *recent.get(each.machine, [""] * len(shown)),
        )
    lines: list[RenderableType] = [table] if result.processes else []
    lines += [Text(visible(line), style="yellow") for line in result.unreadable]
    if has_samples(result.processes) and len(result.fleet.machines) < MIN_MACHINES:
        lines.append(Text("fewer than three processes are running: none can be compared"))
    lines += [Text(f"ALARM: {visible(alarm.describe())}", "bold red") for alarm in result.alarms]
    lines += [Text(visible(line), style="dim") for line in result.notes]
    if not result.alarms and result.comparable:
        lines.append(Text("no process stands out", style="green"))
    elif not result.alarms:
        lines.append(Text("nothing could be compared: no verdict", style="yellow"))
    lines.append(Text(result.health, style="dim"))
    return Group(*lines)


def _format_age(seconds: float) -> str:
    if np.isnan(seconds):
        return "-"
    return f"{abs(seconds):.0f} s {'ago' if seconds >= -1 else 'ahead'}"


def _recent_cells(result: DetectionPass, metrics: list[str], window: float) -> dict[str, list[str]]:
    """Mean of each machine's metrics over the last window, and its ratio to the median."""
    values = result.fleet.select(metrics).last(window).values
    cells = {machine: ["" for _ in metrics] for machine in result.fleet.machines}
    for column in range(len(metrics)):
        means = {
            machine: float(samples[np.isfinite(samples)].mean())
            for machine, samples in zip(result.fleet.machines, values[:, column], strict=True)
            if np.isfinite(samples).any()
        }
        typical = float(np.median(list(means.values()))) if means else 0.0
        for machine, mean in means.items():
            times = f" ({mean / typical:.1f})" if typical > 0 else ""
            cells[machine][column] = f"{mean:.3g}{times}"
    return cells
