"""Custom reward function in a worker process: loaded, called, and its value parsed.

The worker program loads this file by its path; it therefore imports nothing of `jrl`.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, Any]

SPECIAL = "completion_with_special_tokens"
"""The argument by which a reward asks for the completion with special tokens written out."""


def load_source(source: bytes, file: str, name: str) -> ModuleType:
    """The source as a module of this name, as if it lay in the file."""
    module = ModuleType(name)
    module.__file__ = file
    # Dataclasses, and whatever is sent between processes, look their module up by its name.
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_user_module(about: Message, name: str) -> ModuleType:
    """The user's module in this process, which from here on finds modules as the trainer does.

    Args:
      about: its `file` and the `copy` that it is read from, or the `module`; the `path` that
        modules are looked for along.
      name: of a module that is read from a copy.
    """
    sys.path[:] = about["path"]
    # The accelerator is the trainer's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if about["module"] is None:
        return load_source(Path(about["copy"]).read_bytes(), about["file"], name)
    return importlib.import_module(about["module"])


def build_from(module: ModuleType, name: str) -> Any:
    """Returns a module's task of that name; else calls the object and returns its result."""
    target = getattr(module, name)
    judges = hasattr(target, "reward") or hasattr(target, "environment")
    if not isinstance(target, type) and hasattr(target, "prompts") and judges:
        return target
    return target()


class RewardChecker:
    """Answers ``{"prompt": ..., "completion": ..., "fields": {...}}`` by a reward; "special" is the
    completion with special tokens, where that is another text.

    Attributes:
      accepts_batches: whether several questions may be asked at a time: where the reward is
        `async`.
    """

    def __init__(self, reward: Callable[..., Any]):
        self._reward, self._accepted = reward, _accepted_fields(reward)
        self._wants_special = SPECIAL in _parameters(reward)
        called = getattr(reward, "__call__", None)  # noqa: B004, of an object it may be async
        self.accepts_batches = any(map(inspect.iscoroutinefunction, (reward, called)))
        # One loop for all calls: what an async reward keeps open belongs to it.
        self._loop = asyncio.new_event_loop()

    def __call__(self, question: Message) -> Message:
        value = self._call(question)
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(_await_value(value))
        return parse_reward(value)

    def each(
        self, questions: Sequence[Message], seconds: float, send: Callable[[Message], None]
    ) -> None:
        """Answers questions concurrently, and sends ``{"number": ..., "answer": ...}`` when
        one is answered.

        Args:
          seconds: time limit of one, from its start.
        """

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
        fields = question["fields"]
        if self._accepted is not None:
            fields = {name: value for name, value in fields.items() if name in self._accepted}
        if self._wants_special:
            fields = {**fields, SPECIAL: question.get("special", question["completion"])}
        return self._reward(question["prompt"], question["completion"], **fields)


def reward_checker(described: str) -> RewardChecker:
    """A reward of a user's own.

    Args:
      described: as JSON, what `load_user_module` takes; the `name` in that module, and whether it
        `makes` a task or is the reward.
    """
    about = json.loads(described)
    module = load_user_module(about, "jrl_own_reward")
    name = about["name"]
    reward = build_from(module, name).reward if about["makes"] else getattr(module, name)
    return RewardChecker(reward)


def parse_reward(value: Any) -> Message:
    """Result of a reward as JSON: ``{"value": ...}``, ``{"parts": {...}}``, or the failure."""
    if hasattr(value, "score") and hasattr(value, "reason"):
        return {"value": float(value.score), "reason": str(value.reason)}
    try:
        if isinstance(value, Mapping):
            components = {name: _number(component) for name, component in value.items()}
            if not components or not all(isinstance(name, str) and name for name in components):
                raise TypeError(f"{dict(value)!r} has no names")
            numbers, reply = list(components.values()), {"parts": components}
        else:
            reply = {"value": _number(value)}
            numbers = [reply["value"]]
    except (TypeError, OverflowError) as error:
        message = f"a number, or a dict of numbers by name, was expected: {error}"
        return {"failure": "invalid", "message": message[:500]}
    if not all(map(math.isfinite, numbers)):
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


def _accepted_fields(reward: Callable[..., Any]) -> set[str] | None:
    """The fields that a reward takes, None where it takes them all."""
    parameters = _parameters(reward)
    kinds = [parameter.kind for parameter in parameters.values()]
    if not parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    return set(parameters)


def _parameters(reward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Those that can be read off: of some callables written in C none."""
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return {}


async def _await_value(value: Any) -> Any:
    return await value
