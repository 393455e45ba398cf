"""Worker process that answers each JSON line with another, and is killed at its time limit.

The calling thread enforces the time limit from outside. Signals are not used, as only a main thread
may use them; code that never returns to the interpreter is stopped as well.
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

from jrl.processes.progress import heartbeat

Message = dict[str, Any]
PROGRAM = Path(__file__).with_name("worker.py")

# Equal set orders in all workers, and no thread pools (their stacks count as memory).
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

STARTUP_SECONDS = 300.0
"""Time limit in seconds for a worker to load its code and libraries; long, because loading can take
minutes on a busy machine."""
GRACE = 0.5
"""Seconds past the limit of a question after which a program that answers batches is considered
stuck; it enforces the limits itself."""
LOOK = 0.5
"""Interval in seconds at which a wait checks whether this process was frozen."""


class WorkerEnded(RuntimeError):
    """The worker process ended before it answered; the next question starts another."""


class WorkerNotStarted(WorkerEnded):
    """The program reported at its start that it cannot answer."""


def program_worker(kind: str, *arguments: str, seconds: float) -> "Worker":
    """A worker of the program `jrl.tasks.workers.worker`, for one kind of questions, with that
    kind's arguments."""
    command = [sys.executable, "-P", str(PROGRAM), kind, *arguments]
    return Worker(command, seconds=seconds)


def parse_failure(answer: Message | Exception) -> Message:
    """The answer, or ``{"failure": ..., "message": ...}`` for an error; the failure is
    "timeout" or "error"."""
    if isinstance(answer, Exception):
        kind = "timeout" if isinstance(answer, TimeoutError) else "error"
        return {"failure": kind, "message": str(answer)}
    return {"failure": "error", "message": answer["error"]} if "error" in answer else answer


class Worker:
    """A program that is started on demand and answers one question at a time.

    The program first writes one line, ``{}`` or ``{"error": ...}``, then one line for each that it
    reads, and ends when its input does. If its first line is ``{"together": true}``, it also reads
    ``{"together": [...], "seconds": ...}``, and writes ``{"number": ..., "answer": ...}`` for each
    question in it. The worker may be shared between threads.
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
          seconds: time limit of one answer.
          startup_seconds: time limit of the program's first line.
        """
        self._command = list(command)
        self._seconds = seconds
        self._startup_seconds = startup_seconds
        self._lock = threading.Lock()
        self._stop: weakref.finalize | None = None
        self._closed = False

    def ask(self, question: Message, *, seconds: float | None = None) -> Message:
        """Sends a question, any JSON object, and waits for the answer.

        Args:
          seconds: time limit of this answer, if it differs from the worker's.

        Raises:
          TimeoutError: no answer came in time; the process is killed.
          WorkerEnded: the process ended before it answered, or could not be started.
          ValueError: the worker was closed.
        """
        with self._lock:
            self._ensure_running()
            self._send(question)
            return self._receive(self._seconds if seconds is None else seconds)

    def ask_running(self, question: Message, *, seconds: float) -> Message | None:
        """Sends a question to the program if it is running; otherwise returns None without starting
        it.

        Args:
          seconds: time limit of the answer, including the wait for the question in flight.

        Raises:
          TimeoutError: no answer came in time.
          WorkerEnded: the process ended before it answered.
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
        """Sends several questions at a time, each with its own time limit, if the program accepts
        batches; else one after the other, as for questions left unanswered when it was killed.

        Returns:
          For each question its answer, a TimeoutError or a WorkerEnded.

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
        """True if the program answers multiple questions at a time; starts it if it is not running,
        with the errors of `ask`."""
        with self._lock:
            self._ensure_running()
            return bool(self._greeting.get("together"))

    def _ensure_running(self) -> None:
        """Starts the program unless it is running; the caller must hold the lock."""
        if self._closed:
            raise ValueError("worker is closed and answers no more: load the task again")
        if self._stop is not None and self._process.poll() is not None:
            self._kill()  # it ended while idle, which must not fail this question
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
        """Ends the process, and waits for its end; it may be called repeatedly.

        A question in flight raises `WorkerEnded`.
        """
        self._closed = True
        if (stop := self._stop) is not None:
            stop()  # a question in flight holds the lock until then
        with self._lock:
            self._kill()

    def _start(self) -> None:
        # In a session of its own, so that signals to the trainer's process group (an interrupt, a
        # request to save and stop) do not reach it: the trainer still needs this worker's answers.
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
            heartbeat()
            if not line:
                raise WorkerEnded("the worker ended before it answered")
        except BaseException as error:
            # After an interrupt too: a late answer must not be taken for the answer to the next
            # question.
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
    """The next line from the reader thread.

    The time limit excludes time in which this process itself is frozen (SIGSTOP, a machine that
    sleeps), as the reader thread is then frozen too.

    Raises:
      queue.Empty: no line came in time.
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
    """Puts each line into the queue, and at the end, for whatever reason, an empty one."""
    try:
        for line in stream:
            lines.put(line)
    finally:
        lines.put("")


def _end(process: "subprocess.Popen[str]", reader: threading.Thread) -> None:
    if process.poll() is None:
        # Kills all that it started as well, except processes in a session of their own.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        # Closing writes the rest of the buffer, and its reader has ended.
        with contextlib.suppress(BrokenPipeError):
            stream.close()
