"""Rows in processes that are ended at their limit: nothing that a row does ends the table.

A process has the device's memory to itself. Where it dies, or a row takes too long, that row has
failed and another process goes on with the next one.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.parts import PARTS, TORCH, rows_of
from benchmarks.gpu.rows import Figures, Settings, result_of, usable

ROOT = Path(__file__).parents[2]
START = 60.0
"""Seconds that a process may take until its first row."""
PATIENCE = 5
"""Times as long as on an accelerator a row may take at small sizes: a CPU that has other work may
compile for minutes."""
BROKEN = 3
"""Status of a process whose device a row has left unusable."""
MARK = "\x1e"
"""Begins the lines that are meant for the process that started this one."""


def figures_of(part: str, settings: Settings, python: str, until: float) -> Iterator[Figures]:
    """The figures of each row of a part as they come, after a line about the device.

    Args:
      python: the interpreter that runs them.
      until: `time.monotonic` at which no row goes on.
    """
    done, begun = 0, None
    while time.monotonic() < until:
        before, why = done, ""
        with Worker(part, settings, python, skip=done) as worker:
            limit = START
            while not why:
                left = min(limit, until - time.monotonic())
                try:
                    line = worker.line(left)
                except queue.Empty:
                    why = f"took more than {left:.3g} s"
                    continue
                limit = PARTS[part].seconds * (1 if settings.small is False else PATIENCE)
                if line is None:
                    why = f"its process ended with status {worker.status()}"
                elif "end" in line:
                    return
                elif "begin" in line:
                    begun = line["begin"]
                elif "about" in line:
                    yield line
                else:
                    yield {"part": part, **line}
                    begun, done = None, done + 1
        if time.monotonic() >= until:
            break
        if begun is None and done > before and worker.status() == BROKEN:
            continue  # the row that broke the device has said so
        yield {"part": part, **(begun or _all_others(part)), "failed": why}
        if begun is None:
            return
        begun, done = None, done + 1
    yield {"part": part, **(begun or _all_others(part)), "left_out": "time was over"}


def _all_others(part: str) -> Figures:
    return {"row": f"{part}/all others", "form": "any"}


class Worker:
    """A process that measures rows of a part, from one of them on."""

    def __init__(self, part: str, settings: Settings, python: str, skip: int):
        given = json.dumps({"part": part, "skip": skip, "settings": vars(settings)})
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.gpu", "--child", given],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.Queue[Any] = queue.Queue()
        assert self._process.stdout is not None
        self._stream: IO[str] = self._process.stdout
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self._stream:
            if line.startswith(MARK):
                self._lines.put(json.loads(line[1:]))
            else:
                sys.stderr.write(line)
        self._lines.put(None)

    def line(self, seconds: float) -> Any:
        """What it says next, None if it has ended; raises `queue.Empty` after so many seconds."""
        return self._lines.get(timeout=max(seconds, 0.0))

    def status(self) -> int | None:
        """That it ended with."""
        return self._process.wait()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        # It has said all, or is not waited for any longer.
        self._process.kill()
        self._process.wait()
        self._reading.join()
        self._stream.close()


def serve(given: str) -> None:
    """What such a process does."""
    asked = json.loads(given)
    part, settings = asked["part"], Settings(**asked["settings"])
    about, settings = _about(part, settings)
    _say({"about": about})
    for number, row in enumerate(rows_of(part, settings)):
        if number < asked["skip"]:
            continue
        _say({"begin": {"row": row.name, "form": row.form}})
        figures = result_of(row)
        _say(figures)
        # PyTorch goes on in a new process after any failure.
        if "failed" in figures and (part == TORCH or not usable()):
            sys.exit(BROKEN)
    _say({"end": part})


def _say(line: Figures) -> None:
    print(MARK + json.dumps(line), flush=True)


def _about(part: str, settings: Settings) -> tuple[Figures, Settings]:
    """The device and the versions of what runs on it, and the settings: sizes are small on a CPU
    unless they were asked for."""
    from dataclasses import replace
    from importlib.metadata import PackageNotFoundError, version

    packages = ("torch",) if part == TORCH else ("jax", "jaxlib", "tokamax")
    versions = {"python": sys.version.split()[0]} if part != TORCH else {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if part == TORCH:
        return {"versions": versions}, settings
    import jax

    device = jax.devices()[0]
    if settings.small is None:
        settings = replace(settings, small=device.platform == "cpu")
    about = {
        "device": device.device_kind,
        "platform": " ".join(device.client.platform_version.split()),
        "small": settings.small,
        "versions": versions,
    }
    return about, settings
