"""Parts of a task: sources of its prompts, names of its rewards, and hosts of its environments."""

from collections.abc import Callable
from typing import Any

from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.environments.host import Host
from jrl.tasks.task import Example


def prompt_sources(task: Any) -> list[Any]:
    """The sources of a task's prompts, in their order: lists, or tasks that generate theirs."""
    sources = getattr(task, "sources", None)
    return (
        [task]
        if sources is None
        else [leaf for source in sources for leaf in prompt_sources(source)]
    )


def as_prompt_list(leaf: Any) -> PromptList | None:
    """A source as a list; None if it generates its prompts."""
    return leaf if isinstance(leaf, PromptList) else None


def lists_of(task: Any) -> list[PromptList]:
    """Those of the sources that are lists."""
    return [
        prompt_list
        for leaf in prompt_sources(task)
        if (prompt_list := as_prompt_list(leaf)) is not None
    ]


def task_names(task: Any) -> tuple[str, ...]:
    """The tasks of a mixture; empty of any other."""
    return getattr(task, "task_names", ())


def part_names(task: Any) -> tuple[str, ...]:
    """All parts of rewards that a verdict of a task can have; empty of a verifier's."""
    return getattr(task, "part_names", ())


def environments_of(task: Any, example: Example) -> Host | None:
    """Host of the environment of an example; None if a completion is a single turn."""
    if names := task_names(task):
        return environments_of(task.sources[names.index(example.task)], example)
    return getattr(task, "environments", None)


def has_environments(task: Any) -> bool:
    """True if any of a task's completions are conversations."""
    if hasattr(task, "environments"):
        return True
    return any(has_environments(source) for source in getattr(task, "sources", ()))


def leave_out(task: Any, fits: Callable[[Example], bool]) -> int:
    """Leaves out the prompts of lists that do not fit; returns how many they were.

    Raises:
      ValueError: where a list would have none left on one side.
    """
    return sum(prompt_list.leave_out(fits) for prompt_list in lists_of(task))
