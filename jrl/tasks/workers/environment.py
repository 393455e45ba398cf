"""Environments in a worker process: created, stepped, and their results parsed.

The worker program loads this file by its path; it therefore imports nothing of `jrl`.
"""

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from types import ModuleType
from typing import Any

Message = dict[str, Any]

ROLES = ("user", "tool", "system")
"""Roles of an environment's messages."""
MAX_OPEN_CONVERSATIONS = 4096
"""Conversations whose environments a process keeps; the oldest is dropped, and played again where
it goes on after all."""


_SURROGATES = re.compile("[\ud800-\udfff]")


class Conversations:
    """Environments of active conversations.

    The output of an environment must depend on its record and on the messages so far alone. One
    that is missing, for instance because its process was ended for another's time-out, is created
    again, and the conversation replayed. Each is closed once, where it has a `close`: when its
    conversation is over, when it raises, in `end`, or in `close`.

    Args:
      make: the environment of a record's fields.
      await_: waits for what an ``async`` method gave.
    """

    def __init__(self, make: Callable[[Message], Any], await_: Callable[[Any], Any]):
        self._make, self._await = make, await_
        self._open: dict[int, tuple[Any, int]] = {}

    def __call__(self, question: Message) -> Message:
        """Answers ``{"open": true, "fields": ...}``, ``{"conversation": number, "fields": ...,
        "said": [...]}``, ``{"end": number}`` and ``{"close": true}``."""
        if "close" in question:
            self.close()
            return {}
        if "end" in question:
            self.end(question["end"])
            return {}
        if "open" in question:
            return {"messages": self.opening_messages(question["fields"])}
        return self.answer(question["conversation"], question["fields"], question["said"])

    def opening_messages(self, fields: Message) -> list[list[str]]:
        """Role and content of the messages that an environment begins with."""
        environment = self._make(fields)
        try:
            return messages_of(self._await_result(environment.reset()))
        finally:
            self._close(environment)

    def answer(
        self, conversation_id: int, fields: Message, messages: Sequence[Message | str]
    ) -> Message:
        """Returns the environment's reply to the last message of the policy.

        Args:
          conversation_id: id of the conversation.
          fields: of its record.
          messages: all messages of the policy so far; a text is one with that content.

        Returns:
          ``{"messages": ..., "reward": ..., "done": ...}`` or ``{"failure": ..., "message": ...}``.
        """
        environment, num_seen = self._open.pop(conversation_id, (None, 0))
        begins = environment is None
        if begins:
            environment = self._make(fields)
        reply: Message = {}
        try:
            if begins:
                self._await_result(environment.reset())
            for each in messages[num_seen:]:
                message = {"role": "assistant", "content": each} if isinstance(each, str) else each
                result = self._await_result(environment.step(message))
                reply = parse_step(result)
                if "failure" in reply or reply["done"]:
                    break
        except BaseException:  # an interrupt as well: nobody else knows of it
            self._close(environment)
            raise
        if "failure" in reply or reply.get("done"):
            self._close(environment)
            return reply
        self._open[conversation_id] = environment, len(messages)
        while len(self._open) > MAX_OPEN_CONVERSATIONS:
            self.end(next(iter(self._open)))
        return reply

    def end(self, conversation_id: int) -> None:
        """Forgets a conversation that ends early."""
        environment, _ = self._open.pop(conversation_id, (None, 0))
        self._close(environment)

    def close(self) -> None:
        """Forgets all of them; where one raises, the others are closed before that is said."""
        with ExitStack() as stack:
            for conversation_id in list(self._open):
                stack.callback(self.end, conversation_id)

    def _close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if callable(close):
            self._await_result(close())

    def _await_result(self, value: Any) -> Any:
        return self._await(value) if inspect.isawaitable(value) else value


def messages_of(value: Any) -> list[list[str]]:
    """Role and content of messages: a list of ``{"role": ..., "content": ...}``; a text alone is
    the user's; None is none.

    Raises:
      TypeError: for anything else.
    """
    if value is None:
        return []
    if isinstance(value, str | Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise TypeError(f"messages are a {type(value).__name__}: give a list of them")
    pairs = []
    for message in value:
        message = {"role": "user", "content": message} if isinstance(message, str) else message
        if not isinstance(message, Mapping):
            raise TypeError(f"a message is {message!r}: give role and content"[:300])
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise TypeError(
                f"a message has role={role!r} and content={content!r}: the role is one of "
                f"{', '.join(ROLES)}, the content a text"[:300]
            )
        # Half of a character, which JSON may have and no tokenizer takes.
        pairs.append([role, _SURROGATES.sub("\ufffd", content)])
    return pairs


def parse_step(value: Any) -> Message:
    """Result of a step as JSON: messages, reward and done, or the failure."""
    try:
        messages, reward, done = value
        messages = messages_of(messages)
        if hasattr(reward, "item"):  # of numpy, JAX, PyTorch
            reward = reward.item()
        if not isinstance(reward, Real):
            raise TypeError(f"the reward is {reward!r}")
        reward = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"messages, reward, done were expected of a step: {error}"
        return {"failure": "invalid", "message": message[:500]}
    if not math.isfinite(reward):
        return {"failure": "not_finite", "message": f"the reward of a step is {reward}"}
    done = bool(done)
    if not done and not messages:
        message = "a step that is not done returned no message for the policy to answer"
        return {"failure": "invalid", "message": message}
    return {"messages": messages, "reward": reward, "done": done}


def environment_checker(described: str, users: ModuleType) -> Conversations:
    """For the environments of a user's own task.

    Args:
      described: as of `jrl.tasks.workers.reward.reward_checker`, of what makes a task.
      users: the module of `load_user_module` and `build_from`, `jrl.tasks.workers.reward`.
    """
    about = json.loads(described)
    module = users.load_user_module(about, "jrl_own_task")
    make = environment_factory(users.build_from(module, about["name"]))
    # One loop for all calls: what an async environment keeps open belongs to it.
    loop = asyncio.new_event_loop()

    async def awaited(value: Any) -> Any:
        return await value

    return Conversations(make, lambda value: loop.run_until_complete(awaited(value)))


def environment_factory(task: Any) -> Callable[[Message], Any]:
    """Makes the environments of a task, each of the fields that its ``environment`` names."""
    make = task.environment
    try:
        parameters = inspect.signature(make).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = None if takes_all else {parameter.name for parameter in parameters}
    except (TypeError, ValueError):  # some callables written in C
        names = None

    def create(fields: Message) -> Any:
        items = fields.items()
        return make(**{name: x for name, x in items if names is None or name in names})

    return create
