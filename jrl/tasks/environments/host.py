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
"""Seconds for closing all environments of a process at the end, and for the calls before that."""


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
      full_marks: their sum from which on a conversation is correct.
      failed: the score where the environment failed.
    """

    full_marks: float = 1.0
    failed: float = 0.0

    def verdict(self, rewards: Sequence[float], failure: str | None) -> Verdict:
        """Of a conversation that is over, or was ended."""
        if failure is not None:
            return Verdict(self.failed, failure, ())
        score = float(sum(rewards))
        if score >= self.full_marks:
            return Verdict(score, "correct", ())
        return Verdict(score, "partial" if score > 0 else "wrong", ())


@runtime_checkable
class Host(Protocol):
    """Environments of conversations, which are known by numbers."""

    @property
    def scoring(self) -> Scoring: ...

    def opening_messages(self, fields: Message) -> list[list[str]]:
        """Role and content of the messages that the environment of a record begins with.

        Raises:
          ValueError: where it gives none.
        """
        ...

    def say(
        self, conversation_id: int, example: Example, messages: PolicyMessages
    ) -> "Future[Reply]":
        """Submits all messages of the policy; the future is the environment's reply to the last. A
        text is a message with that content."""
        ...

    def end(self, conversation_id: int) -> None:
        """Closes the environment of a conversation that ends early; one that is over needs none."""
        ...

    def close(self) -> None:
        """Closes all environments, and ends worker processes, if there are any."""
        ...


class LocalHost(Conversations):
    """Environments of the library, which are trusted: in this process, without a limit of time."""

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
    """Environments of a user's own, in worker processes.

    A conversation stays with one worker. Where a worker was ended, for a step that took too long,
    its other conversations are played again in the next.

    Args:
      reference: of the task.
      seconds: how long one call may take.
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
            # After what it has been asked already: only then is it known what is open.
            worker.submit(lambda: self._end_conversation(worker, conversation_id))

    def close(self) -> None:
        """Closes all environments and ends the worker processes; more than once does no harm."""
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
        # What is to be played again has the time of all its steps.
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
        # Nobody reads this call's future: what is not said here is never said.
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
    """A worker, and the conversations in it; what it is asked is asked in turn.

    Attributes:
      members: conversations that belong here.
      started: those of them whose environments the process has.
      pending: what it has been asked and not answered.
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
        """As `Worker.ask`, in the thread of its own; with the failure in place of an error."""
        try:
            return parse_failure(self.worker.ask(question, seconds=seconds))
        except Exception as error:
            # Whatever it was, the process ended or may have, and all conversations of it.
            self.started.clear()
            return parse_failure(error)

    def close(self) -> str | None:
        """Closes the environments and ends the process; what went wrong, if anything did."""
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
