"""Custom code in a worker process: rewards and environments.

The worker program loads this file by its path; it therefore imports nothing of `jrl`.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, Any]

SPECIAL = "completion_with_special_tokens"
"""Parameter by which a reward requests the completion with special tokens written out."""


def load_source(source: bytes, file: str, name: str) -> ModuleType:
    """Runs source code as a module of this name, with `file` as its path."""
    module = ModuleType(name)
    module.__file__ = file
    # Dataclasses and pickle look up their module by its name.
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
    except ModuleNotFoundError as error:
        del sys.modules[name]
        missing = (error.name or "").partition(".")[0]
        beside = Path(file).parent / missing
        if not missing or not (beside.is_dir() or beside.with_suffix(".py").is_file()):
            raise
        raise ModuleNotFoundError(
            f"{error}: a run has a copy of {Path(file).name} alone, without what lies beside it. "
            f"Put the code of {missing} into that file, or install it as a package",
            name=error.name,
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_user_module(about: Message, name: str) -> ModuleType:
    """Loads the user's module in this process, with the trainer's module search path.

    Args:
      about: its `file` and the `copy` that is read, or the `module`; and the `path` on which
        modules are searched.
      name: name given to a module that is read from a copy.
    """
    sys.path[:] = about["path"]
    # The accelerator belongs to the trainer.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if about["module"] is None:
        return load_source(Path(about["copy"]).read_bytes(), about["file"], name)
    return importlib.import_module(about["module"])


def build_from(module: ModuleType, name: str) -> Any:
    """The task of this name in a module; else the result of calling the object of this name."""
    target = getattr(module, name)
    judges = hasattr(target, "reward") or hasattr(target, "environment")
    if not isinstance(target, type) and hasattr(target, "prompts") and judges:
        return target
    return target()


class RewardChecker:
    """Answers ``{"prompt": ..., "completion": ..., "fields": {...}}`` by a reward; "special" is the
    completion with special tokens, if that differs.

    It `accepts_batches` of questions if the reward is `async`.
    """

    def __init__(self, reward: Callable[..., Any]):
        self._reward, self._accepted = reward, _accepted_fields(reward)
        self._wants_special = SPECIAL in (_parameters(reward) or ())
        called = getattr(reward, "__call__", None)  # noqa: B004, of an object it may be async
        self.accepts_batches = any(map(inspect.iscoroutinefunction, (reward, called)))
        # One event loop for all calls, as resources of an async reward are bound to it.
        self._loop = asyncio.new_event_loop()

    def __call__(self, question: Message) -> Message:
        value = self._call(question)
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(value)
        return parse_reward(value)

    def each(
        self, questions: Sequence[Message], seconds: float, send: Callable[[Message], None]
    ) -> None:
        """Answers questions concurrently, each with a time limit from its start, and sends
        ``{"number": ..., "answer": ...}`` for each as soon as it is answered."""

        async def answer_one(index: int, question: Message) -> None:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    value = await self._call(question)
                answer = parse_reward(value)
            except Exception as error:
                if limit.expired():
                    message = f"no answer within {seconds} seconds"
                    answer = {"failure": "timeout", "message": message}
                else:
                    answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            send({"number": index, "answer": answer})

        async def answer_all() -> None:
            await asyncio.gather(*(answer_one(*each) for each in enumerate(questions)))

        self._loop.run_until_complete(answer_all())

    def _call(self, question: Message) -> Any:
        fields = _select_fields(question["fields"], self._accepted)
        if self._wants_special:
            fields = {**fields, SPECIAL: question.get("special", question["completion"])}
        return self._reward(question["prompt"], question["completion"], **fields)


def reward_checker(described: str) -> RewardChecker:
    """A custom reward.

    Args:
      described: JSON of the argument of `load_user_module`, with the `name` in that module, and
        whether it `makes` a task or is the reward.
    """
    about = json.loads(described)
    module = load_user_module(about, "jrl_own_reward")
    name = about["name"]
    if not hasattr(module, name):
        raise ValueError(f"it has no {name}")
    reward = build_from(module, name).reward if about["makes"] else getattr(module, name)
    return RewardChecker(reward)


def parse_reward(value: Any) -> Message:
    """Result of a reward as JSON: ``{"value": ...}``, ``{"parts": {...}}``, or the failure."""
    if hasattr(value, "score") and hasattr(value, "reason"):
        return {"value": float(value.score), "reason": str(value.reason)}
    try:
        if isinstance(value, Mapping):
            numbers = {name: _number(component) for name, component in value.items()}
            if not numbers or not all(isinstance(name, str) and name for name in numbers):
                raise TypeError(f"{dict(value)!r} has no names")
            reply = {"parts": numbers}
        else:
            reply = numbers = {"value": _number(value)}
    except (TypeError, OverflowError) as error:
        message = f"a number, or a dict of numbers by name, was expected: {error}"
        return {"failure": "invalid", "message": message[:500]}
    if not all(map(math.isfinite, numbers.values())):
        return {"failure": "not_finite", "message": f"it gave {value!r}"[:500]}
    return reply


def _number(value: Any) -> float:
    if hasattr(value, "item"):  # of numpy, JAX, PyTorch
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"{value!r} is not a single number") from error
    if not isinstance(value, Real):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    return float(value)


def _accepted_fields(function: Callable[..., Any]) -> set[str] | None:
    """The fields that a function accepts; None if it accepts all, or cannot be inspected."""
    parameters = _parameters(function)
    if parameters is None or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return set(parameters)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function; None for some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _select_fields(fields: Message, accepted: set[str] | None) -> Message:
    return {name: x for name, x in fields.items() if accepted is None or name in accepted}


ROLES = ("user", "tool", "system")
"""Roles of an environment's messages."""
MAX_OPEN_CONVERSATIONS = 4096
"""Maximum number of open environments in a process; the oldest is closed, and its conversation
replayed if it continues."""


_SURROGATES = re.compile("[\ud800-\udfff]")


class Conversations:
    """Environments of active conversations (`jrl.tasks.environments.definition.Environment`).

    An environment that does not exist, for instance because its process was ended at the time limit
    of another, is created again, and the conversation replayed. Each one with a method `close` is
    closed once: when its conversation is over, when it raises, in `end`, or in `close`.

    Args:
      make: makes an environment from a record's fields.
      await_: runs the awaitable of an ``async`` method to its end.
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
        """Role and content of the opening messages of an environment."""
        environment = self._make(fields)
        try:
            return messages_of(self._await_result(environment.reset()))
        finally:
            self._close(environment)

    def answer(
        self, conversation_id: int, fields: Message, messages: Sequence[Message | str]
    ) -> Message:
        """The environment's reply to the last of the policy's messages so far; a plain text is a
        message with that content.

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
        except BaseException:  # interrupts too: no other reference to it exists
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
        """Closes the environment of a conversation that ends early."""
        environment, _ = self._open.pop(conversation_id, (None, 0))
        self._close(environment)

    def close(self) -> None:
        """Closes all environments; if one raises, the others are closed before it propagates."""
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
    """Role and content of messages, given as a list of ``{"role": ..., "content": ...}``; a plain
    text is a user message, and None is no message.

    Raises:
      TypeError: for any other type.
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
        # JSON may have lone surrogates, and tokenizers reject them.
        pairs.append([role, _SURROGATES.sub("\ufffd", content)])
    return pairs


def parse_step(value: Any) -> Message:
    """Result of a step as JSON: messages, reward and done, or the failure."""
    try:
        messages, reward, done = value
        messages, reward = messages_of(messages), _number(reward)
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


def environment_checker(described: str) -> Conversations:
    """Environments of a custom task, described as for `reward_checker`."""
    about = json.loads(described)
    module = load_user_module(about, "jrl_own_task")
    make = environment_factory(build_from(module, about["name"]))
    # One event loop for all calls, as resources of an async environment are bound to it.
    return Conversations(make, asyncio.new_event_loop().run_until_complete)


def environment_factory(task: Any) -> Callable[[Message], Any]:
    """Makes environments of a task from the fields that its ``environment`` names as parameters."""
    make, accepted = task.environment, _accepted_fields(task.environment)
    return lambda fields: make(**_select_fields(fields, accepted))
