"""Workers that share the questions of a step, each answer with a time limit of its own."""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from jrl.tasks.workers.process import Message, Worker, WorkerEnded, WorkerNotStarted

MAX_DEFAULT_WORKERS = 8
"""Workers at most where nobody chose their number: each takes some 150 MB."""
QUESTIONS_PER_WORKER = 4
"""Questions that are worth another worker: its start takes as long as many answers."""
MAX_BATCH = 64
"""Questions at most that a worker answers at a time."""


def default_workers() -> int:
    """As many as the processor cores of this process, up to `MAX_DEFAULT_WORKERS`."""
    affine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, cores)


class Pool:
    """Workers that all run the same program, started as they are needed.

    The answers come in the order of the questions, from any worker. A worker that does not answer
    in time is killed and restarted while the others continue. A question during which a worker
    ended is asked once more. It may be shared between threads.

    Args:
      make: makes a worker.
      size: how many there are; None is `default_workers`.
      prepare: what a worker is asked before a question, without that the answer's time runs: what
        it has to know first. None is nothing.
      prepare_seconds: how long that may take.
      batched: whether the program may be one that answers several questions at a time; nothing is
        prepared then.
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
        # The last that was used comes first: few questions start few workers.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._prepare, self._batched = prepare, batched
        self._prepare_seconds = prepare_seconds

    def ask(self, question: Message, *, seconds: float | None = None) -> Message:
        """One question, answered in this thread by a worker that is idle; as `Worker.ask`.

        With a time limit of its own nothing is prepared.
        """
        with self._worker() as worker:
            if self._prepare is not None and seconds is None:
                prepared = worker.ask(self._prepare(question), seconds=self._prepare_seconds)
                if "error" in prepared:
                    return prepared
            return worker.ask(question, seconds=seconds)

    def ask_all(self, questions: Sequence[Message]) -> list[Message | Exception]:
        """All questions, spread over the workers.

        Returns:
          For each its answer, or the TimeoutError, or the WorkerEnded of its second time, that
          came in its place.

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
            pending.clear()  # where the wait was interrupted, nobody begins another
        for reply in answers:
            if isinstance(reply, Exception) and not isinstance(reply, TimeoutError | WorkerEnded):
                raise reply
        return answers

    def _batch_size(self, share: int) -> int:
        """Questions that a thread takes: its share, if the program answers several together."""
        if not self._batched:
            return 1
        try:
            with self._worker() as worker:
                return min(share, MAX_BATCH) if worker.accepts_batches() else 1
        except (TimeoutError, WorkerEnded, ValueError):
            return 1  # as the question will say

    def _try_ask(self, questions: Sequence[Message]) -> list[Message | Exception]:
        answers = self._ask_once(questions)
        # Any process may be killed, as by a kernel that is out of memory: that is no fault of the
        # question, unless it ends a second worker.
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
        """One that is idle, and not for others meanwhile."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all processes, at work or not; more than once does no harm."""
        for worker in self._workers:
            worker.close()


def _has_lost_worker(answer: Message | Exception) -> bool:
    return isinstance(answer, WorkerEnded) and not isinstance(answer, WorkerNotStarted)


def _take_batch(pending: deque[tuple[int, Message]], max_batch: int) -> list[tuple[int, Message]]:
    """The first that are left, which other threads take as well."""
    batch: list[tuple[int, Message]] = []
    with suppress(IndexError):
        while len(batch) < max_batch:
            batch.append(pending.popleft())
    return batch
