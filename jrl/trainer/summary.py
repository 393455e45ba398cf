"""Metrics of a step: of its completions, and of its mini-batches."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import Batch
from jrl.rollout.answer_statistics import Answered, answer_statistics
from jrl.rollout.sampler import Completion, accuracy, lengths_of, scores_of
from jrl.trainer.learner.metrics import Outcome, PerUpdate, merge_metrics


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
    """Single-turn completions with a verdict, as `jrl.rollout.answer_statistics` reads them."""
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
    values = {
        "turns": [len(each.policy_messages) for each in conversations],
        "cut_turns": [len(each.truncated_turns) for each in conversations],
        "answer_tokens": [each.num_answer_tokens for each in conversations],
        "turn_limit": [each.turn_limit for each in conversations],
    }
    return {f"conversation/{name}": float(np.mean(of_each)) for name, of_each in values.items()}


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


def describe(
    completions: Sequence[Completion],
    batch: Batch[Array],
    sampled: Array,
    group_size: int,
) -> dict[str, float]:
    """Metrics of the completions themselves: scores, rewards, advantages, lengths.

    Scores, rewards and lengths are about finished responses; if there is none, there are no such
    metrics.

    Args:
      batch: the completions with their rewards and advantages.
      sampled: ``[batch, time]`` the mask before anything was rejected.
      group_size: consecutive rows that share a prompt, if all responses are finished.
    """
    scores, lengths = scores_of(completions), lengths_of(completions)
    rewards, advantages, mask, valid, finished = to_host(
        (batch.rewards, batch.advantages, sampled, batch.valid, batch.finished)
    )
    # Dynamic sampling may find no informative group.
    masked_advantages = advantages[mask] if mask.any() else np.zeros(1)
    truncated = np.array([completion.truncated for completion in completions])
    metrics = {**_spread("critic/advantages", masked_advantages), "training/tokens": valid.sum()}
    # Unfinished responses are not verified: their score of 0 has no meaning.
    if finished is not None:
        scores, lengths, rewards, truncated = (
            x[finished] for x in (scores, lengths, rewards, truncated)
        )
    if len(scores):
        metrics |= {
            **_spread("critic/score", scores),
            **_spread("critic/rewards", rewards),
            "critic/rewards/std": rewards.std(),
            **_spread("response_length", lengths),
            "response_length/clip_ratio": truncated.mean(),
        }
        # Responses that are continued finish at other steps than their group.
        if finished is None:
            metrics["critic/score/group_std"] = scores.reshape(-1, group_size).std(axis=1).mean()
        if finished is None and group_size > 1:
            group_rewards = rewards.reshape(-1, group_size)
            metrics["frac_reward_zero_std"] = (np.ptp(group_rewards, axis=1) == 0).mean()
    metrics |= (
        reward_means(completions) | task_metrics(completions) | conversation_metrics(completions)
    )
    metrics |= answer_statistics(single_turn_answers(completions))
    return {name: float(value) for name, value in metrics.items()}


def _spread(name: str, numbers: np.ndarray) -> dict[str, Any]:
    return {f"{name}/{part}": getattr(numbers, part)() for part in ("mean", "max", "min")}


def summarise(history: list[dict[str, Outcome[Any]]]) -> dict[str, float]:
    """Metrics of a step from the outcomes of its mini-batches, merged over those with a token in
    the loss mask (`jrl.trainer.learner.metrics`); missing if there are none. Losses and gradient
    norms are means over mini-batches."""
    summary: dict[str, float] = {}
    for network in ("actor", "critic"):
        outcomes = [entry[network] for entry in history if network in entry]
        outcomes = [outcome for outcome in outcomes if not outcome.empty]
        updates = [
            {
                f"{network}/loss": PerUpdate(outcome.loss),
                f"{network}/grad_norm": PerUpdate(outcome.grad_norm),
                **outcome.metrics,
                # The critic's experts are balanced too, and not plotted.
                **({"moe/load": outcome.load} if outcome.load and network == "actor" else {}),
            }
            for outcome in outcomes
        ]
        summary |= merge_metrics(updates)
    return summary


def count_updates(history: list[dict[str, Outcome[Any]]]) -> dict[str, float]:
    """Number of updates of a step that were made and skipped and, under a `buffer_factor`,
    recomputed."""
    outcomes = [outcome for entry in history for outcome in entry.values()]
    actor = [entry["actor"] for entry in history if "actor" in entry]
    overflows = [outcome.overflow for outcome in outcomes if outcome.overflow is not None]
    counts = {
        "training/optimizer_steps": float(sum(each.finite and not each.empty for each in actor)),
        "training/nonfinite_skipped": float(sum(not each.finite for each in outcomes)),
        # Skipped for lack of tokens in the loss mask only.
        "training/empty_skipped": float(sum(each.finite and each.empty for each in outcomes)),
    }
    if overflows:
        counts["training/overflow_repeated"] = float(np.count_nonzero(overflows))
        counts["moe/overflow"] = float(np.sum(overflows))
    return counts


def drift_alarm(metrics: Mapping[str, float], bound: float | None) -> dict[str, float]:
    """Alarm for a drift of the sampler from the trainer, as a metric: 1 if ``sampling/k3_kl`` is
    above `bound` or NaN, else 0. Empty if it was not measured, or `bound` is None."""
    if bound is None or "sampling/k3_kl" not in metrics:
        return {}
    # Negated, so that NaN raises the alarm.
    return {"sampling/drift_alarm": float(not metrics["sampling/k3_kl"] <= bound)}
