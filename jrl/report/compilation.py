"""Compilation on the terminal: "compiling the update, 12 s".

JAX compiles a function when it is first called, for seconds to minutes in which nothing else
happens. `CompilationWatch` listens to JAX's own events: a program is lowered, then compiled.
"""

import threading
import time
from typing import Any, NamedTuple

import jax
from rich.console import Console

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
MIN_SECONDS = 1.0
"""Seconds of a compilation that nobody needs to be told of."""
NAMES = {
    "update": "the update",
    "admit": "the pass over prompts",
    "advance": "the decoding loop",
    "logprobs_of": "the scoring pass",
    "logprobs_and_entropy_of": "the scoring pass",
    "logprobs_and_choices_of": "the scoring pass",
    "values_of": "the critic's scoring pass",
}
"""Names on the terminal of functions that take long to compile, by function name."""


class Compilation(NamedTuple):
    """A program on its way through the compiler."""

    name: str
    started: float


class CompilationWatch:
    """Tells of compilations that take more than a second, for as long as it is entered.

    A progress display draws `line` where one is on the terminal (`set_drawing`); elsewhere each
    long compilation is one printed line.

    Args:
      console: where to print; standard output by default.
      short: seconds after which a compilation is told of.
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
        """The compilation that has been under way for a while; None where there is none."""
        current = self._current
        seconds = 0.0 if current is None else time.monotonic() - current.started
        if current is None or seconds < self._short:
            return None
        return f"compiling {current.name}, {seconds:.0f} s"

    def _on_event(self, event: str, duration_secs: float, **event_fields: Any) -> None:
        # Other threads compile beside the one that waits: only that one is told of.
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
            # Not through the console: it would cut the line where there is no terminal.
            print(f"compiling {current.name} ...", file=self._console.file, flush=True)


_ENTERED: list[CompilationWatch] = []
_DRAWING: list[object] = []


def set_drawing(display: object, is_drawing: bool) -> None:
    """Says whether a display is on the terminal that draws `current_line` itself."""
    if is_drawing:
        _DRAWING.append(display)
    elif display in _DRAWING:
        _DRAWING.remove(display)


def current_line() -> str | None:
    """The line of the compilation under way, None where there is none or nobody watches."""
    return next((line for watch in _ENTERED if (line := watch.line()) is not None), None)
