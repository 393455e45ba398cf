"""A reward of a user's own in a worker process: found, called, and its value read.

Loaded by the worker program by its path, and therefore without anything of `jrl`.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, Any]


def module_of(source: bytes, file: str, name: str) -> ModuleType:
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


def made_by(module: ModuleType, name: str) -> Any:
    """What a module calls by the name, or what that makes where it has no prompts of its own."""
    found = getattr(module, name)
    judges = hasattr(found, "reward") or hasattr(found, "environment")
    if not isinstance(found, type) and hasattr(found, "prompts") and judges:
        return found
    return found()


def reward_checker(described: str) -> Callable[[Message], Message]:
    """Answers ``{"prompt": ..., "completion": ..., "fields": {...}}``.

    Args:
      described: as JSON, the `file` that the reward is of and the `copy` that it is read from, or
        the `module`; its `name` there; whether that `makes` a task or is the reward; and the `path`
        that modules are looked for along.
    """
    about = json.loads(described)
    sys.path[:] = about["path"]
    # The accelerator is the trainer's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if about["module"] is None:
        source = Path(about["copy"]).read_bytes()
        module = module_of(source, about["file"], "jrl_own_reward")
    else:
        module = importlib.import_module(about["module"])
    name = about["name"]
    reward = made_by(module, name).reward if about["makes"] else getattr(module, name)
    takes = _names(reward)
    # One loop for all calls: what an async reward keeps open belongs to it.
    loop = asyncio.new_event_loop()

    def check(question: Message) -> Message:
        fields = question["fields"]
        if takes is not None:
            fields = {name: value for name, value in fields.items() if name in takes}
        value = reward(question["prompt"], question["completion"], **fields)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(_awaited(value))
        return outcome(value)

    return check


def outcome(value: Any) -> Message:
    """What a reward gave, as JSON: ``{"value": ...}``, ``{"parts": {...}}``, or why it is none."""
    if hasattr(value, "score") and hasattr(value, "reason"):
        return {"value": float(value.score), "reason": str(value.reason)}
    try:
        if isinstance(value, Mapping):
            parts = {name: _number(part) for name, part in value.items()}
            if not parts or not all(isinstance(name, str) and name for name in parts):
                raise TypeError(f"{dict(value)!r} has no names")
            numbers, found = list(parts.values()), {"parts": parts}
        else:
            found = {"value": _number(value)}
            numbers = [found["value"]]
    except (TypeError, OverflowError) as error:
        message = f"a number, or a dict of numbers by name, was expected: {error}"
        return {"failure": "invalid", "message": message[:500]}
    if not all(map(math.isfinite, numbers)):
        return {"failure": "not_finite", "message": f"it gave {value!r}"[:500]}
    return found


def _number(value: Any) -> float:
    if hasattr(value, "item"):  # of numpy, JAX, PyTorch
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"{value!r} is no single number") from error
    if not isinstance(value, Real):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    return float(value)


def _names(reward: Callable[..., Any]) -> set[str] | None:
    """The fields that a reward takes, None where it takes them all."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # some callables written in C
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


async def _awaited(value: Any) -> Any:
    return await value
