"""A task from the words a user writes for it."""

import difflib
import re
from collections.abc import Callable

from jrl.tasks.builtin.addition import addition
from jrl.tasks.builtin.countdown import countdown
from jrl.tasks.builtin.progression import progression
from jrl.tasks.builtin.scratchpad import MIN_DIGITS, scratchpad
from jrl.tasks.builtin.sort import sort
from jrl.tasks.gym import gym
from jrl.tasks.jsonl import Fields, jsonl
from jrl.tasks.task import Task

BUILT_IN: dict[str, Callable[[int], Task]] = {
    "sort": sort,
    "addition": addition,
    "scratchpad": scratchpad,
    "countdown": countdown,
    "progression": progression,
}
OUTSIDE = ("jsonl", "gym")


def load_task(
    spec: str, seed: int, fields: Fields | None = None, workers: int | None = None
) -> Task:
    """Makes the task that `spec` asks for.

    Args:
      spec: ``sort``, ``addition``, ``scratchpad``, ``scratchpad:DIGITS`` or
        ``scratchpad:MIN-MAX`` (operands up to so long), ``countdown``, ``progression``,
        ``jsonl:PATH`` or ``gym:NAME``.
      seed: picks the stream of training prompts.
      fields: names of the fields of a file's lines; None is `Fields()`. Other tasks have none.
      workers: processes that check answers, where the task has some; None is one per processor
        core, up to 8.

    Returns:
      A task; close it when it is no longer needed.

    Raises:
      ValueError: there is no such task, or it cannot be loaded.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec](seed)
    kind, _, rest = spec.partition(":")
    if kind == "scratchpad" and (lengths := re.fullmatch(r"(?:(\d+)-)?(\d+)", rest)):
        return scratchpad(seed, (int(lengths[1] or MIN_DIGITS), int(lengths[2])))
    if kind == "jsonl" and rest:
        return jsonl(rest, seed, fields=fields, workers=workers)
    if kind == "gym" and rest:
        return gym(rest, seed, workers=workers)
    near = difflib.get_close_matches(kind, [*BUILT_IN, *OUTSIDE], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"task={spec!r} is unknown: {hint}The tasks are {', '.join(BUILT_IN)}, "
        "scratchpad:DIGITS, scratchpad:MIN-MAX, jsonl:PATH and gym:NAME"
    )
