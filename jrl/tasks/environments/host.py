"""Hosts of environments: this process, or worker processes with a time limit."""

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jrl.report.warnings import FewWarnings
from jrl.tasks.data.records import to_json_value
from jrl.tasks.references import Reference
from jrl.tasks.task import Example, Verdict
from jrl.tasks.workers.environment import Conversations, maker
from jrl.tasks.workers.pool import default_workers
from jrl.tasks.workers.process import Message, Worker, WorkerEnded

Said = Sequence[Message | str]
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

    def opened(self, fields: Message) -> list[list[str]]:
        """Role and content of the messages that the environment of a record begins with.

        Raises:
          ValueError: where it gives none.
        """
        ...

    def say(self, number: int, example: Example, said: Said) -> "Future[Reply]":
        """Submits the policy's messages; the future is the environment's reply to the last one.

        Args:
          said: all of them; a text is a message with that content.
        """
        ...

    def end(self, number: int) -> None:
        """Closes the environment of a conversation that ends early; one that is over needs none."""
        ...

    def close(self) -> None:
        """Closes all environments, and ends worker processes, if there are any."""
        ...


class LocalHost:
    """Environments of the library, which are trusted: in this process, without a limit of time."""

    def __init__(self, definition: Any, scoring: Scoring):
        self.scoring: Scoring = scoring
        self._conversations = Conversations(maker(definition), _never_awaited)

    def opened(self, fields: Message) -> list[list[str]]:
        return self._conversations.opened(fields)

    def say(self, number: int, example: Example, said: Said) -> "Future[Reply]":
        future: Future[Reply] = Future()
        future.set_result(_read(self._conversations.answer(number, dict(example.record), said)))
        return future

    def end(self, number: int) -> None:
        self._conversations.end(number)

    def close(self) -> None:
        self._conversations.close()


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
        self, reference: Reference, *, seconds: float, workers: int | None, scoring: Scoring
    ):
        self.scoring: Scoring = scoring
        self._text, self._seconds = reference.text, seconds
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-environment-")
        folder = self._folder.name
        make = reference.worker_maker("environment", folder, makes=True, seconds=seconds)
        number = default_workers() if workers is None else workers
        self._rooms = [_Room(make()) for _ in range(number)]
        self._room_of: dict[int, _Room] = {}
        self._warnings = FewWarnings()

    def opened(self, fields: Message) -> list[list[str]]:
        sent = json.loads(json.dumps(fields, default=to_json_value))
        room = min(self._rooms, key=lambda room: room.busy)
        answer: Message
        try:
            answer = room.do(lambda: room.ask({"open": True, "fields": sent})).result()
        except Exception as error:
            answer = {"error": str(error)}
        if "error" in answer:
            raise ValueError(f"{self._text} cannot begin a conversation: {answer['error']}")
        return answer["messages"]

    def say(self, number: int, example: Example, said: Said) -> "Future[Reply]":
        room = self._room_of.get(number)
        if room is None:
            room = self._room_of[number] = min(self._rooms, key=lambda room: len(room.members))
            room.members.add(number)
        fields = json.loads(json.dumps(dict(example.record), default=to_json_value))
        question = {"conversation": number, "fields": fields, "said": list(said)}
        return room.do(lambda: self._asked(room, number, question))

    def end(self, number: int) -> None:
        room = self._left(number)
        if room is not None:
            # After what it has been asked already: only then is it known what is open.
            room.do(lambda: self._ended(room, number))

    def close(self) -> None:
        """Closes all environments and ends the worker processes; more than once does no harm."""
        with ThreadPoolExecutor(len(self._rooms)) as together:
            for message in together.map(_Room.close, self._rooms):
                self._warn_unclosed(message)
        self._folder.cleanup()

    def _left(self, number: int) -> "_Room | None":
        room = self._room_of.pop(number, None)
        if room is not None:
            room.members.discard(number)
        return room

    def _asked(self, room: "_Room", number: int, question: Message) -> Reply:
        # What is to be played again has the time of all its steps.
        calls = 1 if number in room.told else 1 + len(question["said"])
        try:
            answer = room.ask(question, seconds=self._seconds * calls)
            room.told.add(number)
        except Exception as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "error"
            answer = {"failure": kind, "message": str(error)}
        if "error" in answer:
            answer = {"failure": "error", "message": answer["error"]}
        if "failure" in answer:
            self._warn(answer)
        if "failure" in answer or answer["done"]:
            room.told.discard(number)
            self._left(number)
        return _read(answer)

    def _ended(self, room: "_Room", number: int) -> None:
        if number not in room.told:
            return
        room.told.discard(number)
        try:
            answer = room.ask({"end": number})
        except Exception as error:
            # Nobody reads this call's future: what is not said here is never said.
            answer = {"error": str(error)}
        self._warn_unclosed(answer.get("error"))

    def _warn_unclosed(self, message: str | None) -> None:
        if message is not None:
            self._warnings.say(
                message, f"{self._text}: an environment could not be closed: {message}"
            )

    def _warn(self, answer: Message) -> None:
        message = f"{answer['failure']}: {answer['message']}"
        self._warnings.say(
            message,
            f"{self._text} failed ({message}); the conversation scores "
            f"{self.scoring.failed:g} and counts under verifier/{answer['failure']}",
        )


class _Room:
    """A worker, and the conversations in it; what it is asked is asked in turn.

    Attributes:
      members: conversations that belong here.
      told: those of them whose environments the process has.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        self.members: set[int] = set()
        self.told: set[int] = set()
        self.busy = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jrl environment")

    def do(self, call: Any) -> "Future[Any]":
        self.busy += 1
        future = self._thread.submit(call)
        future.add_done_callback(lambda _: self._free())
        return future

    def ask(self, question: Message, seconds: float | None = None) -> Message:
        """As `Worker.ask`, in the room's thread."""
        try:
            return self.worker.ask(question, seconds=seconds)
        except Exception:
            # Whatever it was, the process ended or may have, and all conversations of it.
            self.told.clear()
            raise

    def close(self) -> str | None:
        """Closes the environments and ends the process; what went wrong, if anything did."""
        last, wrong = bool(self.told or self.busy), None
        self._thread.shutdown(wait=False, cancel_futures=True)
        if last:
            try:
                answer = self.worker.ask_running({"close": True}, seconds=CLOSING_SECONDS)
                wrong = (answer or {}).get("error")
            except (TimeoutError, WorkerEnded) as error:
                wrong = str(error)
        self.told.clear()
        self.worker.close()
        return wrong

    def _free(self) -> None:
        self.busy -= 1


def _read(answer: Message) -> Reply:
    if "failure" in answer:
        return Reply(failure=answer["failure"])
    messages = tuple((role, content) for role, content in answer["messages"])
    return Reply(messages, answer["reward"], answer["done"])


def _never_awaited(value: Any) -> Any:
    raise TypeError("environments of the library are not async")
