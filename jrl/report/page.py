"""Writer of report.html, runs as one self-contained page: a template, its scripts, JSON data."""

import html
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jrl.program import program
from jrl.report.metrics import always_zero, describe, is_rounding
from jrl.report.plots import PANELS
from jrl.report.suspicion import first_suspicion
from jrl.report.warnings import FewWarnings
from jrl.runs import records
from jrl.runs.folder import RunFolder

ASSETS = {
    "css": "page.css",
    "uplot_css": "uplot/uPlot.min.css",
    "uplot_js": "uplot/uPlot.iife.min.js",
    "js": "page.js",
}
"""Files inserted in the template, by their placeholders."""
UPLOT = "1.6.32"
"""The version of uPlot in `assets/uplot`."""
MAX_POINTS = 1000
"""Maximum number of lines of metrics.jsonl per run; longer files are thinned out evenly."""
RECORDINGS = Path("plugins/profile")
"""Folder of the profiler's recordings, where TensorBoard looks for it."""
OPERATIONS = "operations.json"
"""File of a recording with its largest operations."""
MAX_SAMPLE_CHARACTERS = 1_200_000
"""Maximum characters of JSON for the samples of all runs of a page together."""

INTERVAL = 30.0
"""Least seconds between two drawings of a run in progress, except after an evaluation."""
MAX_SHARE = 0.05
"""Largest share of the time for drawing: a page that takes longer is drawn less often."""


def write_page(folders: Sequence[RunFolder], path: Path | str, *, running: bool = False) -> Path:
    """Write the page of one run, or of several side by side, which may still be in progress.

    The replacement of `path` is atomic.

    Args:
      running: true if this process is writing the run: the page then says how far it was, and when.

    Raises:
      ValueError: for no run, one that is given twice, or a damaged line.
    """
    if not folders:
        raise ValueError("folders=[] holds no run: give at least one")
    path = Path(path)
    data = page_data(folders, path.parent)
    if running:
        data["drawn"] = time.strftime("%Y-%m-%d %H:%M:%S")
    heading = " · ".join(run["name"] for run in data["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    records.replace(path, render_page(data, heading).encode())
    return path


def render_page(data: dict[str, Any], title: str) -> str:
    """The page as HTML."""
    replacements = {name: read_asset(file) for name, file in ASSETS.items()}
    replacements |= {"title": html.escape(title), "data": escape_json(data)}
    # In one pass: inserted text is never searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replacements[match[1]], read_asset("page.html"))


def escape_json(data: Any) -> str:
    """JSON for an HTML script element, escaped so that it cannot end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def read_asset(name: str) -> str:
    """Reads a file of the page's assets."""
    return files("jrl.report").joinpath("assets", name).read_text(encoding="utf-8")


def page_data(folders: Sequence[RunFolder], base: Path | None = None) -> dict[str, Any]:
    """All data of a page in the folder `base`; None is the folder of each run."""
    characters = MAX_SAMPLE_CHARACTERS // len(folders)
    names = distinct_names([folder.path for folder in folders])
    runs = [
        run_data(folder, name, characters, base or folder.path)
        for folder, name in zip(folders, names, strict=True)
    ]
    metric_names = sorted({name for run in runs for name in run["metrics"]})
    return {
        "runs": runs,
        "metrics": {
            name: {
                "definition": metric.definition,
                "unit": metric.unit,
                "rounding": is_rounding(name, _values(runs, name)),
            }
            for name in metric_names
            if (metric := describe(name)) is not None
        },
        "uplot": UPLOT,
        "panels": [records.plain(asdict(panel)) for panel in PANELS],
    }


def _values(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Values of a metric in all runs of a page."""
    columns = [run["metrics"].get(name, ()) for run in runs]
    return [float(value) for column in columns for value in column if value is not None]


def run_data(folder: RunFolder, name: str, characters: int, base: Path) -> dict[str, Any]:
    """Data of one run, by its name on the page in the folder `base`; `characters` limits the JSON
    of its samples."""
    lines = folder.metrics()
    thinned = thin(lines, MAX_POINTS)
    columns = dict.fromkeys(name for line in lines for name in line if name != "step")
    samples = records.read_samples(folder.samples_path) if folder.samples_path.exists() else []
    suspicion = first_suspicion(lines)
    return {
        "name": name,
        "config": folder.config(),
        "versions": folder.versions(),
        "steps": [line["step"] for line in thinned],
        # As in metrics.jsonl: JSON's own spelling of a float, NaN and infinities as strings.
        "metrics": {name: [records.plain(line.get(name)) for line in thinned] for name in columns},
        "lines": len(lines),
        "suspicion": None if suspicion is None else {"step": suspicion[0], "reasons": suspicion[1]},
        "zeros": always_zero(lines),
        "profiles": profile_data(folder, base),
        "samples": fit_samples(samples, characters),
        "num_samples": len(samples),
    }


def profile_data(folder: RunFolder, base: Path) -> list[dict[str, Any]]:
    """Recordings of the profiler, with the address of each trace from the folder `base`."""
    recordings = read_recordings(folder.profiles_path)
    for each in recordings:
        if each["trace"] is not None:
            path = os.path.relpath(folder.profiles_path / each["trace"], base)
            # With a dot: an address is not taken for a protocol, whatever the name of the folder.
            each["trace"] = "./" + quote(Path(path).as_posix())
    return recordings


def read_recordings(profiles: Path) -> list[dict[str, Any]]:
    """The finished recordings of a run by their first step, as
    `jrl.trainer.profiler.write_operations` wrote them, with the path
    of the ``trace`` inside of `profiles`."""
    recordings = []
    for path in (profiles / RECORDINGS).glob(f"*/{OPERATIONS}"):
        content = records.read_object(path, "delete it, or put it back as it was")
        traces = sorted(path.parent.glob("*.trace.json.gz"))
        trace = traces[0].relative_to(profiles).as_posix() if traces else None
        recordings.append({**content, "trace": trace})
    return sorted(recordings, key=lambda each: (each["first"], each["process"]))


def thin(lines: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """About `most` of the lines, evenly; the first, the last and the lines of evaluations are
    kept."""
    every = -(-len(lines) // most)
    last = len(lines) - 1
    return [
        line
        for index, line in enumerate(lines)
        if index % every == 0
        or index == last
        or "val/accuracy/sampled" in line
        or "val/nll" in line
    ]


def fit_samples(samples: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """As many samples as fit, in order: whole steps, evenly over the run; steps with a suspicion
    have priority, then the last and the first."""
    sizes = Counter[int]()
    for sample in samples:
        sizes[sample["step"]] += len(json.dumps(sample))
    selected, budget = set[int](), characters
    suspicious = [sample["step"] for sample in samples if sample.get("kind") == "suspicious"]
    for step in dict.fromkeys([*suspicious, *_bisection_order(sorted(sizes))]):
        if sizes[step] <= budget:
            selected.add(step)
            budget -= sizes[step]
    return [sample for sample in samples if sample["step"] in selected]


def _bisection_order(steps: Sequence[int]) -> list[int]:
    """The last, the first, the middle one, the middles of the halves, and so on."""
    order = list(dict.fromkeys([steps[-1], steps[0]])) if steps else []
    ranges = [(0, len(steps) - 1)]
    while ranges:
        low, high = ranges.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(steps[middle])
            ranges += [(low, middle), (middle, high)]
    return order


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names of the folders, with as many parent folders as are needed to make them distinct."""
    all_components = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, all_components)) + 1):
        names = ["/".join(path_components[-depth:]) for path_components in all_components]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"runs={[str(path) for path in paths]} name a folder twice: give each once")


class LivePage:
    """Draws the page of a run when it begins, after each evaluation, and after steps.

    A thread reads the files of the run and replaces the page, so that a step does not wait for it.

    Args:
      draw: writes the page, from files that grow meanwhile.
      warnings: of the run, for errors of drawing.
      interval: least seconds between two drawings, except after an evaluation.
    """

    def __init__(
        self, draw: Callable[[], object], warnings: FewWarnings, interval: float = INTERVAL
    ):
        self._draw, self._warnings, self._interval = draw, warnings, interval
        self._changed, self._hurry = threading.Event(), threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="jrl report", daemon=True)

    def step_ended(self, evaluated: bool) -> None:
        """Draws the page soon; at once if the step was evaluated."""
        self._changed.set()
        if evaluated:
            self._hurry.set()

    def __enter__(self) -> "LivePage":
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended = True
        self.step_ended(evaluated=True)
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while True:
            self._changed.wait()
            self._hurry.wait(max(0.0, due - time.monotonic()))
            if self._has_ended:
                return
            self._changed.clear()
            self._hurry.clear()
            began = time.monotonic()
            draw_or_warn(self._draw, self._warnings)
            due = began + max(self._interval, (time.monotonic() - began) / MAX_SHARE)


def draw_or_warn(draw: Callable[[], object], warnings: FewWarnings) -> None:
    """Draws a page or plots of a run. An error is printed once and ends no run: the files that are
    drawn stay, and `jrl.report` draws them again."""
    try:
        draw()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = f"the report was not drawn ({reason}); {program('report')} RUN draws it again"
        warnings.warn("drawing", line)
