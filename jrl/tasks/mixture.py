"""Mixture of tasks, interleaved by their weights, and access to the components of a task."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.environments.host import Host
from jrl.tasks.task import Example, Task, Verdict, check_index, pair_completions


def prompt_sources(task: Any) -> list[Any]:
    """The sources of a task's prompts, in order: lists, or tasks that generate their prompts."""
    if (sources := getattr(task, "sources", None)) is None:
        return [task]
    return [leaf for source in sources for leaf in prompt_sources(source)]


def lists_of(task: Any) -> list[PromptList]:
    """The prompt lists among the sources."""
    return [leaf for leaf in prompt_sources(task) if isinstance(leaf, PromptList)]


def task_names(task: Any) -> tuple[str, ...]:
    """The tasks of a mixture; empty for any other task."""
    return getattr(task, "task_names", ())


def part_names(task: Any) -> tuple[str, ...]:
    """Names of all reward components in the verdicts of a task; empty for a verifier's."""
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
    """Leaves out the prompts that do not fit, as `PromptList.leave_out`, from all of its lists."""
    return sum(prompt_list.leave_out(fits) for prompt_list in lists_of(task))


class WeightedRoundRobin:
    """Weighted round-robin over tasks: each has its share of the indices, to within about one.

    An index adds its weight to the credit of each task, and goes to the task with the highest
    credit, the first one of a tie. Exhausted tasks are skipped.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[int | None]):
        self._weights, self._sizes = weights, sizes
        self._credits = [0.0] * len(weights)
        self._num_assigned = [0] * len(weights)
        self._assignments: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Task of an index, and the number of earlier indices of that task."""
        while len(self._assignments) <= index:
            self._assignments.append(self._assign_next())
        return self._assignments[index]

    def _assign_next(self) -> tuple[int, int]:
        sizes = enumerate(self._sizes)
        available = [
            task for task, size in sizes if size is None or self._num_assigned[task] < size
        ]
        for task in available:
            self._credits[task] += self._weights[task]
        next_task = max(available, key=lambda task: self._credits[task])
        self._credits[next_task] -= sum(self._weights[task] for task in available)
        self._num_assigned[next_task] += 1
        return next_task, self._num_assigned[next_task] - 1


class Mixture:
    """Tasks whose prompts are interleaved, in proportion to their weights.

    Training and held-out prompts are mixed in the same way. Exhausted held-out lists are skipped,
    so that every held-out prompt has an index.

    Attributes:
      sources: the tasks, in the order given.
      task_names: their names; an example has one as its `Example.task`.
      part_names: of all reward components that a verdict can have.
    """

    def __init__(self, name: str, tasks: Sequence[Task], weights: Sequence[float]):
        """Mixes tasks.

        Args:
          name: by which the mixture is requested.
          tasks: at least two, with distinct names.
          weights: weights of the tasks, above 0.

        Raises:
          ValueError: if two have the same name, or one trains on prompts that another holds out.
        """
        self.name: str = name
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise ValueError(
                f"task={name!r} has one task twice: give it once, with a larger weight"
            )
        self.sources: tuple[Task, ...] = tuple(self._tasks.values())
        _check_disjoint(self.sources)
        self.task_names: tuple[str, ...] = tuple(self._tasks)
        names = (name for task in self.sources for name in part_names(task))
        self.part_names: tuple[str, ...] = tuple(dict.fromkeys(names))
        self._train = WeightedRoundRobin(weights, [None] * len(weights))
        self._heldout = WeightedRoundRobin(weights, [task.heldout_size for task in self.sources])

    @property
    def max_prompt_length(self) -> int:
        return max(task.max_prompt_length for task in self.sources)

    @property
    def max_response_length(self) -> int:
        return max(task.max_response_length for task in self.sources)

    @property
    def characters(self) -> str:
        return "".join(sorted(set().union(*(task.characters for task in self.sources))))

    @property
    def heldout_size(self) -> int | None:
        sizes = [task.heldout_size for task in self.sources]
        finite = [size for size in sizes if size is not None]
        return sum(finite) if len(finite) == len(sizes) else None

    def train(self, index: int) -> Example:
        """The index-th training example, a function of the tasks, their weights and index alone."""
        check_index(index)
        task, position = self._train[index]
        return replace(self.sources[task].train(position), task=self.task_names[task])

    def heldout(self, index: int) -> Example:
        """The index-th held-out example."""
        check_index(index, self.heldout_size)
        task, position = self._heldout[index]
        return replace(self.sources[task].heldout(position), task=self.task_names[task])

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example, each by its own task."""
        pairs = pair_completions(examples, completions)
        verdicts: dict[str, Iterator[Verdict]] = {}
        for name, task in self._tasks.items():
            rows = [pair for pair in pairs if pair[0].task == name]
            verdicts[name] = iter(task.verify([e for e, _ in rows], [c for _, c in rows]))
        return [next(verdicts[example.task]) for example in examples]

    def close(self) -> None:
        """Ends the worker processes of all."""
        for task in self.sources:
            task.close()


def _check_disjoint(tasks: Sequence[Task]) -> None:
    """Rejects lists of which one trains on prompts that another holds out."""
    lists = [(task.name, prompt_list) for task in tasks for prompt_list in lists_of(task)]
    for name, first in lists:
        heldout = first.heldout_prompts
        for other_name, other in lists:
            if other is not first and (shared := heldout & other.train_prompts):
                raise ValueError(
                    f"task={other_name} trains on {len(shared)} prompts that task={name} holds "
                    f"out, {min(shared)[:60]!r} among them: leave them out, or give both one file "
                    "with --held-out"
                )
