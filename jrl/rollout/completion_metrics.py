"""Metrics of completions by components of the reward, by turns, and by tasks of a mixture."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jrl.rollout.sampler import Completion, accuracy, scores_of
from jrl.tasks.answers.habits import Answered


def reward_means(completions: Sequence[Completion]) -> dict[str, float]:
    """Means ``reward/NAME`` of each reward component over the completions that have it, without the
    weights of the sum."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for completion in completions:
        verdict = completion.verdict
        for name, value in () if verdict is None or verdict.parts is None else verdict.parts:
            values[name].append(value)
    return {
        f"reward/{name}": float(np.mean(component_values))
        for name, component_values in sorted(values.items())
    }


def single_turn_answers(completions: Sequence[Completion]) -> list[Answered]:
    """Single-turn completions with a verdict, as `jrl.tasks.answers.habits` reads them."""
    return [
        Answered(
            each.trajectory.request.prompt, each.text, each.example.answer, each.verdict.correct
        )
        for each in completions
        if each.verdict is not None and each.trajectory.request.conversation is None
    ]


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Means ``conversation/...`` over multi-turn completions: turns of the policy, truncated turns,
    tokens of the environment, and the fraction that the limit of turns ended."""
    of_completions = (completion.trajectory.request.conversation for completion in completions)
    conversations = [each for each in of_completions if each is not None]
    if not conversations:
        return {}
    return {
        "conversation/turns": float(np.mean([len(each.policy_messages) for each in conversations])),
        "conversation/cut_turns": float(
            np.mean([len(each.truncated_turns) for each in conversations])
        ),
        "conversation/answer_tokens": float(
            np.mean([each.num_answer_tokens for each in conversations])
        ),
        "conversation/turn_limit": float(np.mean([each.turn_limit for each in conversations])),
    }


def task_metrics(completions: Sequence[Completion], method: str | None = None) -> dict[str, float]:
    """Metrics ``task/NAME/...`` of each task of a mixture: accuracy and mean score of its
    completions with a verdict, and their number.

    Args:
      method: sampling method of an evaluation, appended to the names; None for training.
    """
    rows: defaultdict[str, list[Completion]] = defaultdict(list)
    for completion in completions:
        if completion.verdict is not None and completion.example.task:
            rows[completion.example.task].append(completion)
    suffix = "" if method is None else f"/{method}"
    metrics: dict[str, float] = {}
    for name, task_rows in sorted(rows.items()):
        metrics[f"task/{name}/accuracy{suffix}"] = accuracy(task_rows)
        metrics[f"task/{name}/score{suffix}"] = float(np.mean(scores_of(task_rows)))
        metrics[f"task/{name}/completions{suffix}"] = float(len(task_rows))
    return metrics
