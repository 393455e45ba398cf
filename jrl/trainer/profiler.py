"""Profiler of a run: records some of its steps with `jax.profiler`."""

import json
import re
import shutil
import signal
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import jax

from jrl.processes.progress import annotate, phase
from jrl.report.page import OPERATIONS, RECORDINGS
from jrl.runs import records

SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""Signal that asks for a recording; None on a platform that lacks it."""
NUM_OPERATIONS = 10
CONTROL_FLOW = re.compile(r"(while|call|conditional|async-(start|done|update))([.\d]*)")
"""Operations whose time is also the time of the operations that they run."""


class Profiler:
    """Recorder of the steps of a run in this process, as a context manager.

    A recording begins with a step of `steps`, or with the first step after SIGUSR1. It is the
    folder ``plugins/profile/step-N`` with a trace that TensorBoard and Perfetto read, in which each
    phase of a step is named. The end of the context completes a recording in progress. A profiler
    that fails prints a warning, and the run goes on.

    Args:
      folder: of the recordings.
      steps: steps to record; the first process records them, or what it runs of them.
      signal_steps: number of steps to record after SIGUSR1, in any process that receives it.
      print_line: prints a message.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        signal_steps: int,
        print_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self._process = jax.process_index()
        self._folder = folder
        self._steps = steps if self._process == 0 else range(0)
        self._signal_steps, self._print_line = signal_steps, print_line
        self._requested = False
        self._recorded: range | None = None  # steps of the recording in progress
        self._step = 0
        self._annotations, self._stack = ExitStack(), ExitStack()

    def __enter__(self) -> "Profiler":
        is_main = threading.current_thread() is threading.main_thread()
        # A signal that is ignored stays so.
        if SIGNAL is not None and is_main and signal.getsignal(SIGNAL) is not signal.SIG_IGN:
            previous = signal.signal(SIGNAL, self._receive)
            self._stack.callback(signal.signal, SIGNAL, previous)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._stack.close()

    def begin_step(self, step: int) -> None:
        """Ends the step before, and begins or ends a recording if it is time to."""
        self._annotations.close()
        if self._recorded is not None and step not in self._recorded:
            self.close()
        requested, self._requested = self._requested, False
        if self._recorded is None and (step in self._steps or requested):
            last = self._steps.stop if step in self._steps else step + self._signal_steps
            self._start(range(step, last))
        self._step = step
        if self._recorded is not None:
            annotation = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._annotations.enter_context(annotation)

    def close(self) -> None:
        """Completes the recording in progress; does nothing if there is none."""
        self._annotations.close()
        if self._recorded is None:
            return
        first, self._recorded = self._recorded.start, None
        annotate(None)
        try:
            with phase("profile"):
                jax.profiler.stop_trace()
                write_operations(self._recording(first), first, self._step, self._process)
        except Exception as error:  # of the profiler or the disk
            self._fail(f"profile of steps {first} to {self._step}", error)
        else:
            self._print_line(f"profiled steps {first} to {self._step}: {self._recording(first)}")

    def _start(self, steps: range) -> None:
        options = jax.profiler.ProfileOptions()
        options.session_id = self._recording(steps.start).name
        options.python_tracer_level = 0  # phases say where Python is, at a fraction of the events
        try:
            if (recording := self._recording(steps.start)).exists():  # of a step that is repeated
                shutil.rmtree(recording)
            recording.mkdir(parents=True)  # before a session that could not be written
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except Exception as error:  # another recording of this process, or the disk
            self._fail(f"profile of steps {steps.start} to {steps.stop - 1}", error)
            if steps.start in self._steps:
                self._steps = range(0)  # one attempt, and one line
            return
        self._recorded = steps
        annotate(lambda name: jax.profiler.TraceAnnotation(name))

    def _recording(self, step: int) -> Path:
        """Folder of the recording that begins with a step."""
        process = f"-process-{self._process}" if self._process else ""
        return self._folder / RECORDINGS / f"step-{step}{process}"

    def _fail(self, what: str, error: Exception) -> None:
        lines = str(error).splitlines() or [type(error).__name__]
        self._print_line(f"warning: no {what}: {lines[0]}; the run goes on")

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True


def write_operations(recording: Path, first: int, last: int, process: int) -> None:
    """Writes the largest operations of a finished recording beside its trace.

    Args:
      recording: folder with the recording's ``.xplane.pb``.
      first: first step of the recording.
      last: last step of the recording, inclusive.
      process: process that recorded it.
    """
    totals = defaultdict[tuple[str, str], float](float)
    for path in recording.glob("*.xplane.pb"):
        for name, program, seconds in _operations(path):
            totals[name, program] += seconds
    everything = sum(totals.values())
    largest = sorted(totals.items(), key=lambda item: -item[1])[:NUM_OPERATIONS]
    content = {
        "first": first,
        "last": last,
        "process": process,
        "seconds": everything,
        "operations": [
            {"name": name, "program": program, "seconds": seconds}
            for (name, program), seconds in largest
        ],
    }
    records.replace(recording / OPERATIONS, (json.dumps(content, indent=2) + "\n").encode())


def _operations(path: Path) -> Iterator[tuple[str, str, float]]:
    """Name, compiled program and seconds of each operation that a device executed.

    GPUs and TPUs have planes of their own, with a line for each stream or for all operations. On a
    CPU the operations are among the events of the host's threads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in devices or planes:
            for line in plane.lines:
                is_operations = line.name.startswith(("Stream", "XLA Ops"))
                if plane in devices and not is_operations:
                    continue
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" not in stats and not is_operations:
                        continue
                    name = str(stats.get("hlo_op", event.name)).removeprefix("%").split(" = ")[0]
                    if not CONTROL_FLOW.fullmatch(name):
                        yield name, str(stats.get("hlo_module", "")), event.duration_ns / 1e9
