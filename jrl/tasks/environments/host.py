"""Hosts of environments: this process, or worker processes with a time limit."""

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jrl.report.warnings import FewWarnings
from jrl.tasks.data.records import as_json
from jrl.tasks.references import CodeReference
from jrl.tasks.task import Example, Verdict
from jrl.tasks.workers.pool import default_workers
from jrl.tasks.workers.process import Message, Worker, WorkerEnded, parse_failure
from jrl.tasks.workers.user_code import Conversations, environment_factory

PolicyMessages = Sequence[Message | str]
"""Messages of the policy."""
CLOSING_SECONDS = 5.0
"""Time limit in seconds for the pending calls of a process and for closing its environments."""


class Reply(NamedTuple):
    """Reply of an environment to a turn of the policy.

    Attributes:
      messages: role and content of each.
      reward: of the turn.
      done: whether the conversation is over.
      failure: reason why there is no reply, one of `jrl.tasks.task.FAILURES`; None if there is one.
    """

    messages: tuple[tuple[str, str], ...] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


@dataclass(frozen=True)
class Scoring:
    """Conversion of the rewards of turns to a verdict.

    Attributes:
      full_marks: the minimum sum of a correct conversation.
      failed: the score if the environment failed.
    """

    full_marks: float = 1.0
    failed: float = 0.0

    def verdict(self, rewards: Sequence[float], failure: str | None) -> Verdict:
        """Verdict on a conversation that is over, or was ended."""
        if failure is not None:
            return Verdict(self.failed, failure, ())
        score = float(sum(rewards))
        if score >= self.full_marks:
            return Verdict(score, "correct", ())
        return Verdict(score, "partial" if score > 0 else "wrong", ())


@runtime_checkable
class Host(Protocol):
    """Environments of numbered conversations."""

    @property
    def scoring(self) -> Scoring: ...

    def opening_messages(self, fields: Message) -> list[list[str]]:
        """Role and content of the opening messages of a record's environment.

        Raises:
          ValueError: if there are none.
        """
        ...

    def say(
        self, conversation_id: int, example: Example, messages: PolicyMessages
    ) -> "Future[Reply]":
        """Submits all messages of the policy so far; the future is the environment's reply to the
        last one. A plain text is a message with that content."""
        ...

    def end(self, conversation_id: int) -> None:
        """Closes the environment of a conversation that ends early; one that is over needs none."""
        ...

    def close(self) -> None:
        """Closes all environments, and ends worker processes, if there are any."""
        ...


class LocalHost(Conversations):
    """Environments of built-in tasks, as they are trusted: in this process, with no time limit."""

    def __init__(self, definition: Any, scoring: Scoring):
        super().__init__(environment_factory(definition), _never_awaited)
        self.scoring: Scoring = scoring

    def say(
        self, conversation_id: int, example: Example, messages: PolicyMessages
    ) -> "Future[Reply]":
        fields, future = dict(example.record), Future[Reply]()
        answer = self.answer(conversation_id, fields, messages)
        future.set_result(_parse_reply(answer))
        return future


class WorkerHost:
    """Environments of custom tasks, in worker processes.

    A conversation stays with one worker. If a worker is ended at a time limit, its other
    conversations are replayed in the next one.

    Args:
      reference: of the task.
      seconds: time limit of one call.
      workers: processes; None is one per processor core, up to 8.
      scoring: of its conversations.
    """

    def __init__(
        self, reference: CodeReference, *, seconds: float, workers: int | None, scoring: Scoring
    ):
        self.scoring: Scoring = scoring
        self._text, self._seconds = reference.text, seconds
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-environment-")
        make = reference.worker_maker("environment", self._folder.name, makes=True, seconds=seconds)
        num_workers = default_workers() if workers is None else workers
        self._workers = [_ConversationWorker(make()) for _ in range(num_workers)]
        self._worker_of: dict[int, _ConversationWorker] = {}
        self._warnings = FewWarnings()

    def opening_messages(self, fields: Message) -> list[list[str]]:
        question = {"open": True, "fields": as_json(fields)}
        worker = min(self._workers, key=lambda worker: len(worker.pending))
        try:
            answer = worker.submit(lambda: worker.ask(question)).result()
        except Exception as error:  # the host was closed
            answer = parse_failure(error)
        if "failure" in answer:
            raise ValueError(f"{self._text} cannot begin a conversation: {answer['message']}")
        return answer["messages"]

    def say(
        self, conversation_id: int, example: Example, messages: PolicyMessages
    ) -> "Future[Reply]":
        worker = self._worker_of.get(conversation_id)
        if worker is None:
            worker = min(self._workers, key=lambda worker: len(worker.members))
            self._worker_of[conversation_id] = worker
            worker.members.add(conversation_id)
        fields, history = as_json(dict(example.record)), list(messages)
        question = {"conversation": conversation_id, "fields": fields, "said": history}
        return worker.submit(lambda: self._ask(worker, conversation_id, question))

    def end(self, conversation_id: int) -> None:
        worker = self._remove(conversation_id)
        if worker is not None:
            # After the pending calls: only then is it known whether the environment is open.
            worker.submit(lambda: self._end_conversation(worker, conversation_id))

    def close(self) -> None:
        """Closes all environments and ends the worker processes; it may be called repeatedly."""
        with ThreadPoolExecutor(len(self._workers)) as executor:
            for message in executor.map(_ConversationWorker.close, self._workers):
                self._warn_unclosed(message)
        self._folder.cleanup()

    def _remove(self, conversation_id: int) -> "_ConversationWorker | None":
        worker = self._worker_of.pop(conversation_id, None)
        if worker is not None:
            worker.members.discard(conversation_id)
        return worker

    def _ask(self, worker: "_ConversationWorker", conversation_id: int, question: Message) -> Reply:
        # A conversation that must be replayed has the time of all its steps.
        calls = 1 if conversation_id in worker.started else 1 + len(question["said"])
        answer = worker.ask(question, seconds=self._seconds * calls)
        if "failure" in answer:
            self._warn(answer)
        if "failure" in answer or answer["done"]:
            worker.started.discard(conversation_id)
            self._remove(conversation_id)
        else:
            worker.started.add(conversation_id)
        return _parse_reply(answer)

    def _end_conversation(self, worker: "_ConversationWorker", conversation_id: int) -> None:
        if conversation_id not in worker.started:
            return
        worker.started.discard(conversation_id)
        # No one reads this call's future, so the warning is given here.
        self._warn_unclosed(worker.ask({"end": conversation_id}).get("message"))

    def _warn_unclosed(self, message: str | None) -> None:
        if message is not None:
            self._warnings.warn(
                message, f"{self._text}: an environment could not be closed: {message}"
            )

    def _warn(self, answer: Message) -> None:
        message = f"{answer['failure']}: {answer['message']}"
        self._warnings.warn(
            message,
            f"{self._text} failed ({message}); the conversation scores "
            f"{self.scoring.failed:g} and counts under verifier/{answer['failure']}",
        )


class _ConversationWorker:
    """A worker and its conversations; requests are answered in order.

    Attributes:
      members: conversations that are assigned to it.
      started: those whose environments exist in the process.
      pending: requests that have no answer yet.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        self.members: set[int] = set()
        self.started: set[int] = set()
        self.pending: set[Future[Any]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jrl environment")

    def submit(self, call: Any) -> "Future[Any]":
        future = self._thread.submit(call)
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)
        return future

    def ask(self, question: Message, seconds: float | None = None) -> Message:
        """As `Worker.ask`, in this worker's thread; an error becomes a failure message."""
        try:
            return parse_failure(self.worker.ask(question, seconds=seconds))
        except Exception as error:
            # After any error the process may have ended, and its environments with it.
            self.started.clear()
            return parse_failure(error)

    def close(self) -> str | None:
        """Closes the environments and ends the process; returns an error message, or None."""
        is_busy, problem = bool(self.started or self.pending), None
        self._thread.shutdown(wait=False, cancel_futures=True)
        if is_busy:
            try:
                answer = self.worker.ask_running({"close": True}, seconds=CLOSING_SECONDS)
                problem = (answer or {}).get("error")
            except (TimeoutError, WorkerEnded) as error:
                problem = str(error)
        self.started.clear()
        self.worker.close()
        return problem


def _parse_reply(answer: Message) -> Reply:
    if "failure" in answer:
        return Reply(failure=answer["failure"])
    messages = tuple((role, content) for role, content in answer["messages"])
    return Reply(messages, answer["reward"], answer["done"])


def _never_awaited(value: Any) -> Any:
    raise TypeError("environments of the library are not async")
