"""A worker process that answers one JSON line with another, and is killed when it takes too long.

The calling thread enforces the time limit from outside of the worker. No signals are used, as only
a main thread may use them, and code that never returns to the interpreter is stopped as well.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jrl.processes.progress import sign

Message = dict[str, Any]
PROGRAM = Path(__file__).with_name("worker.py")

# The same order of sets in every worker, and no pool of threads (its stacks count as memory).
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

STARTUP_SECONDS = 300.0
"""Seconds in which a worker must load its code, with the libraries that it imports: long, as what
loads in seconds takes minutes on a machine with much other work."""
GRACE = 0.5
"""Seconds past the limit of a question after which a program that answers several at a time is
taken to be stuck: it watches the limits itself."""
LOOK = 0.5
"""Seconds of a wait after which it is seen whether this process was frozen."""


class WorkerEnded(RuntimeError):
    """The worker process ended before it answered; the next question starts another."""


class WorkerNotStarted(WorkerEnded):
    """The program said that it cannot answer at all."""


def program_worker(kind: str, *arguments: str, seconds: float) -> "Worker":
    """A worker of the program beside this file (`jrl.tasks.workers.worker`), which answers a kind
    of questions with the kind's arguments."""
    command = [sys.executable, "-P", str(PROGRAM), kind, *arguments]
    return Worker(command, seconds=seconds)


def parse_failure(answer: Message | Exception) -> Message:
    """The answer; in place of an error ``{"failure": ..., "message": ...}``, which is "timeout" or
    "error"."""
    if isinstance(answer, Exception):
        kind = "timeout" if isinstance(answer, TimeoutError) else "error"
        return {"failure": kind, "message": str(answer)}
    return {"failure": "error", "message": answer["error"]} if "error" in answer else answer


class Worker:
    """A program that is started on demand and asked one question at a time.

    The program first writes one line, ``{}`` or ``{"error": ...}``, then one line for each that it
    reads, and ends when its input does. ``{"together": true}`` as its first says that it also reads
    ``{"together": [...], "seconds": ...}``, and writes ``{"number": ..., "answer": ...}`` for each
    question in it. It may be shared between threads.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        seconds: float = 5.0,
        startup_seconds: float = STARTUP_SECONDS,
    ):
        """Describes the worker; the first question starts it.

        Args:
          command: the program and its arguments.
          seconds: how long one answer may take.
          startup_seconds: how long the program may take before its first line.
        """
        self._command = list(command)
        self._seconds = seconds
        self._startup_seconds = startup_seconds
        self._lock = threading.Lock()
        self._stop: weakref.finalize | None = None
        self._closed = False

    def ask(self, question: Message, *, seconds: float | None = None) -> Message:
        """Sends a question, whatever JSON can hold, and waits for the answer.

        Args:
          seconds: how long this answer may take, where that differs from the worker's own limit.

        Raises:
          TimeoutError: no answer came in time; the process is killed.
          WorkerEnded: the process ended without an answer, or could not be started.
          ValueError: the worker was closed.
        """
        with self._lock:
            self._ensure_running()
            self._send(question)
            return self._receive(self._seconds if seconds is None else seconds)

    def ask_running(self, question: Message, *, seconds: float) -> Message | None:
        """Sends a question to the program where it is running; where it is not, there is no answer
        and none is started.

        Args:
          seconds: how long the answer may take, and before it that to the question in flight.

        Raises:
          TimeoutError: no answer came in time.
          WorkerEnded: the process ended without an answer.
        """
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError(f"an earlier call took more than {seconds} seconds")
        try:
            if self._stop is None or self._process.poll() is not None:
                return None
            self._send(question)
            return self._receive(max(end - time.monotonic(), 0.0))
        finally:
            self._lock.release()

    def ask_batch(self, questions: Sequence[Message]) -> list[Message | Exception]:
        """Several questions at a time, each with its own time limit, if the program takes them so;
        else one after the other, as those that it left without an answer where it had to be killed.

        Returns:
          For each its answer, or the TimeoutError or WorkerEnded that came in its place.

        Raises:
          ValueError: the worker was closed.
        """
        answers: dict[int, Message | Exception] = {}
        with contextlib.suppress(TimeoutError, WorkerEnded), self._lock:
            self._ensure_running()
            if self._greeting.get("together"):
                self._send({"together": list(questions), "seconds": self._seconds})
                for _ in questions:
                    reply = self._receive(self._seconds + GRACE)
                    answers[reply["number"]] = reply["answer"]
        for index, question in enumerate(questions):
            if index not in answers:
                try:
                    answers[index] = self.ask(question)
                except (TimeoutError, WorkerEnded) as error:
                    answers[index] = error
        return [answers[index] for index in range(len(questions))]

    def accepts_batches(self) -> bool:
        """True if the program answers multiple questions at a time; it is started, if need be, with
        the errors of `ask`."""
        with self._lock:
            self._ensure_running()
            return bool(self._greeting.get("together"))

    def _ensure_running(self) -> None:
        """Has the program running; with the lock."""
        if self._closed:
            raise ValueError("worker is closed and answers no more: load the task again")
        if self._stop is not None and self._process.poll() is not None:
            self._kill()  # it ended while nobody asked, and that is no fault of this question
        if self._stop is None:
            self._start()
        if self._closed:
            raise WorkerEnded("the worker was closed")

    def _send(self, question: Message) -> None:
        try:
            self._input.write(json.dumps(question) + "\n")
            self._input.flush()
        except (OSError, ValueError) as error:  # it has ended, or was closed meanwhile
            self._kill()
            raise WorkerEnded(f"the worker accepted no call: {error}") from error

    def close(self) -> None:
        """Ends the process, and waits until it is gone; more than once does no harm.

        A question that is being asked ends with `WorkerEnded`.
        """
        self._closed = True
        if (stop := self._stop) is not None:
            stop()  # who asks holds the lock until then
        with self._lock:
            self._kill()

    def _start(self) -> None:
        # A session of its own: what is typed at or sent to the trainer's process group (an
        # interrupt, a request to save and stop) is for the trainer, which still needs this worker's
        # answers.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
            encoding="utf-8",
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(
            target=_read, args=(process.stdout, self._lines), name="jrl worker reader", daemon=True
        )
        reader.start()
        self._stop = weakref.finalize(self, _end, process, reader)
        self._greeting = self._receive(self._startup_seconds)
        if "error" in self._greeting:
            self._kill()
            raise WorkerNotStarted(self._greeting["error"])

    def _receive(self, seconds: float) -> Message:
        try:
            line = next_line(self._lines.get, seconds)
            sign()
            if not line:
                raise WorkerEnded("the worker ended before it answered")
        except BaseException as error:
            # Interrupted, too: the answer that is still to come must not meet the next question.
            self._kill()
            if isinstance(error, queue.Empty):
                raise TimeoutError(f"no answer within {seconds} seconds") from None
            raise
        return json.loads(line)

    def _kill(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


def next_line(
    get: Callable[..., str], seconds: float, clock: Callable[[], float] = time.monotonic
) -> str:
    """The next of the lines that a thread passes on.

    Time in which this process itself is frozen (SIGSTOP, a machine that sleeps) does not count: the
    thread could not pass on what was there.

    Raises:
      queue.Empty: none came in time.
    """
    while True:
        wait, before = min(seconds, LOOK), clock()
        try:
            return get(timeout=wait)
        except queue.Empty:
            if clock() - before < wait + LOOK:
                seconds -= wait
                if seconds <= 0:
                    raise


def _read(stream: Iterable[str], lines: "queue.SimpleQueue[str]") -> None:
    """Passes lines on, and at the end, however it comes, an empty one."""
    try:
        for line in stream:
            lines.put(line)
    finally:
        lines.put("")


def _end(process: "subprocess.Popen[str]", reader: threading.Thread) -> None:
    if process.poll() is None:
        # With all that it started, but for what went into a session of its own.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        # Closing writes what is left in the buffer, and nobody reads it any more.
        with contextlib.suppress(BrokenPipeError):
            stream.close()
