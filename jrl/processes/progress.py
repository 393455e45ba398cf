"""Progress of this process: the phase that its main thread is in, and its heartbeats.

A run enters phases and sends heartbeats, and a `jrl.processes.watchdog.Watchdog` reads them.
Both cost a few microseconds, and nothing is sent here.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

AGREEMENT = "agreement"
"""Phase of a collective on host values (`jrl.processes.agreement`): a process waits for others."""
CHECKPOINT = "checkpoint"
COMPILE = "compile"
ENVIRONMENT = "environment"
REWARD = "reward"
START = "start"
STEP = "step"
"""Rest of a step, between its phases."""
NEVER_COMPILE = (AGREEMENT, ENVIRONMENT, REWARD, STEP)
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Position:
    """Position of this process in a run.

    Attributes:
      phase: phase of the main thread: "start", "warm start", "step" (what is in none of the
        following), "rollout", "reward", "environment", "scoring", "update", "evaluation",
        "checkpoint", "report", "profile", "agreement".
      outer: the phase that `phase` is a part of; empty if there is no such phase.
      part: part of the phase, if the host counts them, for example "mini-batch 2"; may be empty.
      step: training step that is in progress, from 1; 0 before the first.
      agreements: collectives on host values that were entered, which all processes enter in the
        same order: of two processes, the one with the lower number has not arrived.
      heartbeats: number of heartbeats so far.
      compiles: true while a thread compiles.
      is_first: true if `phase` has not been left before, and may compile or load.
      seconds: since the phase was entered.
    """

    phase: str
    outer: str
    part: str
    step: int
    agreements: int
    heartbeats: int
    compiles: bool
    is_first: bool
    seconds: float


class Progress:
    """Recorder of the phases of one thread; other threads only send heartbeats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._thread = threading.get_ident()
        self._phases: list[tuple[str, float]] = [(START, clock())]
        self._part, self._left = "", set[str]()
        self._compiling = set[int]()
        self._agreements = self._heartbeats = 0
        self._step = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager of a phase, which may be inside of another one."""
        self._agreements += name == AGREEMENT
        self._heartbeats += 1
        thread = threading.get_ident()
        is_recorded = thread == self._thread
        if is_recorded:
            self._phases.append((name, self._clock()))
            self._part = ""
        try:
            with _annotation(name):
                yield
        finally:
            if is_recorded:
                self._phases.pop()
                self._left.add(name)
                self._part = ""
            self._compiling.discard(thread)  # of a function that was lowered only
            self._heartbeats += 1

    def begin_step(self, step: int) -> None:
        """Records that a training step begins."""
        self._step, self._heartbeats = step, self._heartbeats + 1
        self._phases[0] = STEP, self._clock()

    def heartbeat(self, part: str = "") -> None:
        """Records progress, from any thread, and the part of the main thread's phase that begins
        with it (for example "mini-batch 2")."""
        self._heartbeats += 1
        if part:
            self._part = part

    def position(self) -> Position:
        """Current position of this process; from any thread."""
        phases = list(self._phases)
        name, entered = phases[-1]
        outer = phases[-2][0] if len(phases) > 2 else ""
        return Position(
            phase=name,
            outer=outer,
            part=self._part,
            step=self._step,
            agreements=self._agreements,
            heartbeats=self._heartbeats,
            compiles=bool(self._compiling),
            is_first=name not in self._left and name not in NEVER_COMPILE,
            seconds=self._clock() - entered,
        )

    @contextmanager
    def watching_compilation(self) -> Iterator[None]:
        """Context manager in which compilations of JAX are recorded."""
        import jax  # here, as programs without JAX send heartbeats too

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **fields: Any) -> None:
        """JAX lowers a function, then compiles it; each event is the end of one of them."""
        self._heartbeats += 1
        if event == LOWERED:
            self._compiling.add(threading.get_ident())
        elif event == COMPILED:
            self._compiling.discard(threading.get_ident())


_annotation: Callable[[str], AbstractContextManager[Any]] = nullcontext
_current = Progress()


def annotate(annotation: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """Enters `annotation` with the name of each phase, from here on; None enters nothing."""
    global _annotation
    _annotation = nullcontext if annotation is None else annotation


def phase(name: str) -> Any:
    """`Progress.phase` of the run in this process."""
    return _current.phase(name)


def heartbeat(part: str = "") -> None:
    """`Progress.heartbeat` of the run in this process."""
    _current.heartbeat(part)


def begin_step(step: int) -> None:
    """`Progress.begin_step` of the run in this process."""
    _current.begin_step(step)


def start() -> Progress:
    """New record of a run whose main thread is the calling one."""
    global _current
    _current = Progress()
    return _current
