"""Pool of workers for the requests of a step, with a time limit per answer."""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from jrl.tasks.workers.process import Message, Worker, WorkerEnded, WorkerNotStarted

MAX_DEFAULT_WORKERS = 8
"""Maximum of the default number of workers: each takes some 150 MB."""
QUESTIONS_PER_WORKER = 4
"""Number of requests per additional worker: starting it takes as long as many answers."""
MAX_BATCH = 64
"""Maximum number of requests that a worker answers at a time."""


def default_workers() -> int:
    """The number of processor cores of this process, up to `MAX_DEFAULT_WORKERS`."""
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, cores)


class Pool:
    """Workers that all run the same program, started on demand.

    The answers come in the order of the questions, from any worker. A worker that does not answer
    in time is killed and restarted while the others continue. A question during which a worker
    ended is sent once more. The pool may be shared between threads.

    Args:
      make: makes a worker.
      size: number of workers; None is `default_workers`.
      prepare: makes a preparatory question that is sent before a question, outside of its time
        limit; None sends none.
      prepare_seconds: time limit of the preparation.
      batched: whether the program may answer several questions at a time; nothing is prepared
        then.
    """

    def __init__(
        self,
        make: Callable[[], Worker],
        size: int | None = None,
        *,
        prepare: Callable[[Message], Message] | None = None,
        prepare_seconds: float = 60.0,
        batched: bool = False,
    ):
        size = default_workers() if size is None else size
        if size < 1:
            raise ValueError(f"verifiers={size} must be at least 1.")
        self._workers = [make() for _ in range(size)]
        # The most recently used worker comes first: few questions start few workers.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._prepare, self._batched = prepare, batched
        self._prepare_seconds = prepare_seconds

    def ask(self, question: Message, *, seconds: float | None = None) -> Message:
        """Sends one question in this thread to an idle worker; as `Worker.ask`.

        With a time limit of its own, nothing is prepared.
        """
        with self._worker() as worker:
            if self._prepare is not None and seconds is None:
                prepared = worker.ask(self._prepare(question), seconds=self._prepare_seconds)
                if "error" in prepared:
                    return prepared
            return worker.ask(question, seconds=seconds)

    def ask_all(self, questions: Sequence[Message]) -> list[Message | Exception]:
        """Sends all questions, distributed over the workers.

        Returns:
          For each question its answer, or a TimeoutError, or the WorkerEnded of its second attempt.

        Raises:
          ValueError: the pool was closed.
        """
        answers: list[Message | Exception] = [{} for _ in questions]
        pending = deque(enumerate(questions))
        num_threads = min(len(self._workers), -(-len(questions) // QUESTIONS_PER_WORKER))

        def answer() -> None:
            max_batch = self._batch_size(-(-len(questions) // num_threads))
            while batch := _take_batch(pending, max_batch):
                replies = self._try_ask([question for _, question in batch])
                for (index, _), reply in zip(batch, replies, strict=True):
                    answers[index] = reply

        threads = [
            threading.Thread(target=answer, name="jrl pool", daemon=True)
            for _ in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            pending.clear()  # after an interrupt, no thread takes another batch
        for reply in answers:
            if isinstance(reply, Exception) and not isinstance(reply, TimeoutError | WorkerEnded):
                raise reply
        return answers

    def _batch_size(self, share: int) -> int:
        """Number of questions per batch: the share of a thread, if the program accepts batches."""
        if not self._batched:
            return 1
        try:
            with self._worker() as worker:
                return min(share, MAX_BATCH) if worker.accepts_batches() else 1
        except (TimeoutError, WorkerEnded, ValueError):
            return 1  # the question itself will raise the error

    def _try_ask(self, questions: Sequence[Message]) -> list[Message | Exception]:
        answers = self._ask_once(questions)
        # A process may be killed from outside, for instance when memory is exhausted: a question
        # fails only if it ends a second worker.
        return [
            self._ask_once([question])[0] if _has_lost_worker(answer) else answer
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _ask_once(self, questions: Sequence[Message]) -> list[Message | Exception]:
        try:
            if len(questions) == 1:
                return [self.ask(questions[0])]
            with self._worker() as worker:
                return worker.ask_batch(questions)
        except Exception as error:
            return [error] * len(questions)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        """An idle worker, reserved until the end of the context."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all processes, busy or idle; it may be called repeatedly."""
        for worker in self._workers:
            worker.close()


def _has_lost_worker(answer: Message | Exception) -> bool:
    return isinstance(answer, WorkerEnded) and not isinstance(answer, WorkerNotStarted)


def _take_batch(pending: deque[tuple[int, Message]], max_batch: int) -> list[tuple[int, Message]]:
    """Removes the next questions from the queue that the threads share."""
    batch: list[tuple[int, Message]] = []
    with suppress(IndexError):
        while len(batch) < max_batch:
            batch.append(pending.popleft())
    return batch
