"""Compilation on the terminal: "compiling the policy update: 40 s the last time".

JAX compiles a function at its first call, for seconds to minutes during which nothing else happens.
`CompilationWatch` listens to JAX's events: a program is lowered, then compiled. Durations are kept
beside JAX's compilation cache, for the next run.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from sharding.sharded_jit import AWAITED, READY

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
MIN_SECONDS = 1.0
"""Seconds of a compilation below which it is not reported."""
DURATIONS = "jrl_compilations.json"
"""File in JAX's compilation cache with the seconds of each program, by kind of run."""
MAX_KINDS = 200
"""Kinds of runs whose durations are kept, the last ones."""
NAMES = {
    "update": "the update of the weights",
    "admit": "the pass over prompts",
    "admit_prefilled": "the pass over prompts",
    "run_packed": "the pass over prompts",
    "copy_to_cache": "the copy of prompts to the cache",
    "advance": "the decoding loop",
    "write": "the copy of completions",
    "targets_of": "the advantages",
    "_copy_leaves": "the copy of the policy",
    "create": "the state of the run",
    "unstack": "the policy for decoding",
    "move": "the policy for decoding",
    "make_batch": "the batch of a step",
    "_score_packed": "the scoring pass",
    "correct": "the mismatch correction",
    "mismatch_metrics": "the comparison of sampler and trainer",
    "_mismatch_of": "the comparison of sampler and trainer",
    "score_rows": "the scoring pass",
    "read_rows": "the scoring pass",
}
"""Displayed names of functions that take long to compile, by function name."""


class Compilation(NamedTuple):
    """A program that is being compiled."""

    name: str
    key: str
    started: float
    last: float | None


class Durations:
    """Seconds that each program took to compile in the last run of a kind.

    Args:
      kind: what decides the programs of a run, for example a hash of its network and sizes.
      folder: folder of the file; None is JAX's compilation cache. Without a folder, or if its file
        cannot be read or written, nothing is known: the durations are for a message alone.
    """

    def __init__(self, kind: str, folder: Path | None = None):
        cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        folder = Path(cache) if folder is None and cache else folder
        self._kind = kind
        self._path = folder / DURATIONS if folder is not None and folder.is_dir() else None

    def last(self, program: str) -> float | None:
        """Seconds of a program the last time; None if unknown."""
        seconds = self._read().get(self._kind, {}).get(program)
        return seconds if isinstance(seconds, int | float) else None

    def record(self, program: str, seconds: float) -> None:
        """Keeps the seconds of a program."""
        if self._path is None:
            return
        kinds = self._read()
        kinds[self._kind] = {**kinds.pop(self._kind, {}), program: round(seconds, 1)}
        newest = dict(list(kinds.items())[-MAX_KINDS:])
        try:
            # Of this process: runs that end together replace each other's file, not its half.
            temporary = self._path.with_name(f"{DURATIONS}.{os.getpid()}")
            temporary.write_text(json.dumps(newest))
            temporary.replace(self._path)
        except OSError:
            self._path = None

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = {} if self._path is None else json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        kinds = content.items() if isinstance(content, dict) else ()
        return {kind: programs for kind, programs in kinds if isinstance(programs, dict)}


class CompilationWatch:
    """Reports compilations that take more than a second, while the context is active.

    A progress display on a terminal draws `line` itself (`set_drawing`); elsewhere each long
    compilation is one printed line.

    Args:
      console: target of the lines; standard output by default.
      short: seconds after which a compilation is reported.
      durations: of the last run of this kind, replaced by the durations of this run; None has
        none.
      names: names of functions in this run, in addition to `NAMES`.
    """

    def __init__(
        self,
        console: Console | None = None,
        short: float = MIN_SECONDS,
        durations: Durations | None = None,
        names: Mapping[str, str] | None = None,
    ):
        self._console = console or Console()
        self._short, self._durations = short, durations
        self._names = {**NAMES, **(names or {})}
        self._programs = Counter[str]()
        self._current: Compilation | None = None
        self._timer: threading.Timer | None = None
        self._main = threading.get_ident()

    def __enter__(self) -> "CompilationWatch":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        _ENTERED.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _ENTERED.remove(self)
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._end()

    def line(self) -> str | None:
        """The current compilation if it takes long; else None."""
        current = self._current
        seconds = 0.0 if current is None else time.monotonic() - current.started
        if current is None or seconds < self._short:
            return None
        last = "" if current.last is None else f" ({current.last:.0f} s the last time)"
        return f"compiling {current.name}, {seconds:.0f} s{last}"

    def _on_event(self, event: str, duration_secs: float, **event_fields: Any) -> None:
        # Compilations of other threads do not block the main thread: only its own are reported.
        if threading.get_ident() != self._main:
            return
        if event in (LOWERED, AWAITED):
            self._begin(str(event_fields.get("fun_name", "")))
        elif event in (COMPILED, READY):
            self._record(duration_secs)
            self._end()

    def _begin(self, function: str) -> None:
        self._end()
        word = function.removeprefix("jit(").removesuffix(")")
        unknown = f"a program ({word})" if word.isidentifier() else "a program"
        # A function is compiled once for each of its shapes, in the same order in every run.
        self._programs[word] += 1
        key = f"{word} {self._programs[word]}"
        last = None if self._durations is None else self._durations.last(key)
        self._current = Compilation(self._names.get(word, unknown), key, time.monotonic(), last)
        self._timer = threading.Timer(self._short, self._print)
        self._timer.daemon = True
        self._timer.start()

    def _record(self, seconds: float) -> None:
        """Keeps a duration that was reported, or replaces one that is kept."""
        current, durations = self._current, self._durations
        if current is None or durations is None:
            return
        if seconds >= self._short or current.last is not None:
            durations.record(current.key, seconds)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._current = self._timer = None

    def _print(self) -> None:
        current = self._current
        if current is not None and not _DRAWING:
            # Not through the console, which would cut the line if there is no terminal.
            last = " ..." if current.last is None else f": {current.last:.0f} s the last time"
            print(f"compiling {current.name}{last}", file=self._console.file, flush=True)


_ENTERED: list[CompilationWatch] = []
_DRAWING: list[object] = []


def set_drawing(display: object, is_drawing: bool) -> None:
    """Registers whether a display on the terminal draws `current_line` itself."""
    if is_drawing:
        _DRAWING.append(display)
    elif display in _DRAWING:
        _DRAWING.remove(display)


def current_line() -> str | None:
    """The line of the current compilation; None if nothing compiles or no watch is active."""
    return next((line for watch in _ENTERED if (line := watch.line()) is not None), None)
