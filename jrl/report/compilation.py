"""Compilation on the terminal: "compiling the update, 12 s".

JAX compiles a function at its first call, for seconds to minutes during which nothing else happens.
`CompilationWatch` listens to JAX's events: a program is lowered, then compiled.
"""

import threading
import time
from typing import Any, NamedTuple

import jax
from rich.console import Console

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
MIN_SECONDS = 1.0
"""Seconds of a compilation below which it is not reported."""
NAMES = {
    "update": "the update",
    "admit": "the pass over prompts",
    "advance": "the decoding loop",
    "logprobs_of": "the scoring pass",
    "logprobs_and_entropy_of": "the scoring pass",
    "logprobs_and_choices_of": "the scoring pass",
    "values_of": "the critic's scoring pass",
}
"""Displayed names of functions that take long to compile, by function name."""


class Compilation(NamedTuple):
    """A program that is being compiled."""

    name: str
    started: float


class CompilationWatch:
    """Reports compilations that take more than a second, while the context is active.

    A progress display on a terminal draws `line` itself (`set_drawing`); elsewhere each long
    compilation is one printed line.

    Args:
      console: target of the lines; standard output by default.
      short: seconds after which a compilation is reported.
    """

    def __init__(self, console: Console | None = None, short: float = MIN_SECONDS):
        self._console = console or Console()
        self._short = short
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
        return f"compiling {current.name}, {seconds:.0f} s"

    def _on_event(self, event: str, duration_secs: float, **event_fields: Any) -> None:
        # Compilations of other threads do not block the main thread: only its own are reported.
        if threading.get_ident() != self._main:
            return
        if event == LOWERED:
            self._begin(str(event_fields.get("fun_name", "")))
        elif event == COMPILED:
            self._end()

    def _begin(self, function: str) -> None:
        self._end()
        word = function.removeprefix("jit(").removesuffix(")")
        name = NAMES.get(word, "a program" if not word.isidentifier() else f"a program ({word})")
        self._current = Compilation(name, time.monotonic())
        self._timer = threading.Timer(self._short, self._print)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._current = self._timer = None

    def _print(self) -> None:
        current = self._current
        if current is not None and not _DRAWING:
            # Not through the console, which would cut the line if there is no terminal.
            print(f"compiling {current.name} ...", file=self._console.file, flush=True)


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
