"""Evaluation on held-out prompts: of a policy, in training or saved, and of a critic."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import IO, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import pass_at_k
from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import per_turn_rewards
from jrl.report.critic import CriticRollout
from jrl.rollout.collection.collect import add_verdicts, batch_of_completions, groups_of
from jrl.rollout.decoding.slots import ranks
from jrl.rollout.sampler import (
    Completion,
    Sampler,
    accuracy,
    correct_of,
    lengths_of,
    numbered_heldout,
    scores_of,
    sort_completions,
)
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import REASONS, Example, Task
from jrl.text.prompt_format import PromptFormat
from jrl.trainer.learner.update import CriticObjective, Network
from jrl.trainer.scoring import values_of
from jrl.trainer.summary import conversation_metrics, reward_means, task_metrics
from moe.weights import Transformer

Row = TypeVar("Row")

Report = Callable[[str, int, int], None]
"""Callback for the progress of an evaluation: the phase, completions done, and their total."""
OnCompletions = Callable[[str, list[Completion]], None]
"""Callback with the completions of a phase, when all of them are verified."""

MAX_ROWS_PER_CALL = 1024
"""Approximate number of completions decoded and scored in one call; bounds the memory."""

_rewards = jax.jit(per_turn_rewards)


def heldout_examples(task: Task, num_examples: int) -> list[Example]:
    """First held-out prompts: `num_examples` of them, or all there are if they are fewer."""
    size = task.heldout_size
    num_examples = num_examples if size is None else min(num_examples, size)
    return [task.heldout(index) for index in range(num_examples)]


def pad_with_repeats(examples: Sequence[Row], unit: int) -> list[Row]:
    """Pads the examples to a multiple of `unit` with repetitions, so that they divide over devices.
    The caller has to ignore the padding."""
    return [examples[index % len(examples)] for index in range(-(-len(examples) // unit) * unit)]


def heldout_metrics(
    sampler: Sampler,
    sampling: Sampling,
    examples: Sequence[Example],
    on_sampled: Callable[[list[Completion]], None] = lambda completions: None,
) -> dict[str, float]:
    """Metrics of one sampled and one greedy completion per prompt, of the loaded policy.

    Args:
      on_sampled: called with the sampled completions, in the order of the prompts.
    """
    begin = time.perf_counter()
    # RNG keys depend on the prompt ids: every evaluation of a run uses the same keys (common random
    # numbers), so that two of them are paired.
    prompts = numbered_heldout(examples)
    requests = sampler.requests(prompts, 1)
    # The sampled completions are verified while the greedy ones are decoded.
    decodings = [sampler.decode(requests, prompts, mode) for mode in (sampling, GREEDY)]
    sampled, greedy = (decoding.wait() for decoding in decodings)
    on_sampled(sort_completions(sampled, prompts))
    return {
        **{f"val/{name}": value for name, value in _details(sampled, greedy).items()},
        "val/prompts": float(len(examples)),
        "val/accuracy/sampled": accuracy(sampled),
        "val/accuracy/greedy": accuracy(greedy),
        "val/score/sampled": float(np.mean(scores_of(sampled))),
        "val/score/greedy": float(np.mean(scores_of(greedy))),
        "val/response_length/mean": float(np.mean(lengths_of(sampled))),
        "val/response_length/clip_ratio": float(np.mean([c.truncated for c in sampled])),
        "timing_s/testing": time.perf_counter() - begin,
    }


def evaluate(
    sampler: Sampler,
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    report: Report = lambda phase, done, total: None,
    on_completions: OnCompletions = lambda phase, completions: None,
) -> dict[str, float | int]:
    """Computes accuracies, pass@k, lengths and the verifier's reasons.

        results = evaluate(sampler, Sampling(temperature=0.7), num_prompts=500, k=8)
        print(results["accuracy/sampled"], results["pass@8"])

    Args:
      sampler: with the policy loaded.
      sampling: sampling parameters of the `k` completions of a prompt.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt; pass@k is given for 1, 2, 4, ... and `k`.
      report: called with "sampled" or "greedy", the completions done and all there will be.
      on_completions: called with "sampled" or "greedy" and its completions, all completions of a
        prompt in one call.

    Returns:
      Numbers by name; lengths and counts of the verifier are about the sampled completions.
    """
    examples = numbered_heldout(heldout_examples(sampler.task, num_prompts))

    def complete(phase: str, sampling: Sampling, num_samples: int) -> list[Completion]:
        def decoded(done: int) -> None:
            report(phase, done, len(examples) * num_samples)

        decoded(0)
        completions = sampler.sample(examples, sampling, num_samples, report=decoded)
        on_completions(phase, completions)
        return completions

    sampled, greedy = complete("sampled", sampling, k), complete("greedy", GREEDY, 1)
    full = correct_of(sampled)
    correct = full.reshape(-1, k).sum(axis=1)
    # The unbiased estimator of pass@k needs the number of correct completions only.
    counts: list[int] = correct.tolist()
    reasons = Counter(c.verdict.reason for c in sampled if c.verdict is not None)
    results = {
        "prompts": len(examples),
        "accuracy/sampled": full.mean(),
        # Over prompts, as completions of one prompt are not independent.
        "accuracy/sampled/standard_error": (correct / k).std() / math.sqrt(len(examples)),
        "accuracy/greedy": correct_of(greedy).mean(),
        # In float64, unlike `scores_of`: they are printed, and are part of no loss.
        "score/sampled": np.mean([completion.score for completion in sampled]),
        "score/greedy": np.mean([completion.score for completion in greedy]),
        **{
            f"pass@{n}": np.mean([float(pass_at_k(k, c, n)) for c in counts])
            for n in _powers_up_to(k)
        },
        "response_length/mean": lengths_of(sampled).mean(),
        "response_length/clip_ratio": np.mean([completion.truncated for completion in sampled]),
        **{f"verifier/{reason}": reasons[reason] for reason in REASONS},
    }
    results |= _details(sampled, greedy)
    return {name: np.asarray(value).item() for name, value in results.items()}


def _details(sampled: list[Completion], greedy: list[Completion]) -> dict[str, float]:
    """Metrics of the parts of rewards, of the tasks of a mixture, and of conversations."""
    by_task = task_metrics(sampled, "sampled") | task_metrics(greedy, "greedy")
    return reward_means(sampled) | by_task | conversation_metrics(sampled)


def _powers_up_to(k: int) -> list[int]:
    """Powers of two below `k`, and `k` itself."""
    return [*(2**n for n in range((k - 1).bit_length())), k]


class Completions:
    """Writer of the completions of each phase.

    Args:
      path: path of the file; entering this overwrites it. None writes no file.
      format: encoding of the prompts.
      show: number of prompts of which a completion is kept for display.

    Attributes:
      shown: the first sampled completion of each of the first prompts, as records of the file.
    """

    def __init__(self, path: str | None, format: PromptFormat, show: int):
        self._path, self._format, self._show = path, format, show
        self._file: IO[str] | None = None
        self._stack = ExitStack()
        self.shown: list[dict[str, Any]] = []

    def add(self, phase: str, completions: Sequence[Completion]) -> None:
        """Takes the completions of a phase, "sampled" or "greedy"."""
        for completion in completions:
            request = completion.trajectory.request
            # Held-out prompts count down from -1.
            position = {"kind": phase, "number": -1 - request.prompt, "sample": request.sample}
            shows = phase == "sampled" and request.sample == 0 and len(self.shown) < self._show
            if self._file is None and not shows:
                continue
            record = {**position, **completion.record(self._format)}
            if shows:
                self.shown.append(record)
            if self._file is not None:
                self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        if self._file is not None:
            self._file.flush()

    def __enter__(self) -> "Completions":
        if self._path is not None:
            self._file = self._stack.enter_context(open(self._path, "w", encoding="utf-8"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._file = None


def evaluate_critic(
    sampler: Sampler,
    network: Network[CriticObjective],
    critic: Transformer[Array],
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    report: Report = lambda phase, done, total: None,
) -> CriticRollout:
    """Samples `k` completions of each held-out prompt, and scores them with the critic.

    Rewards are computed as in training, in a multi-turn conversation on the last token of each
    turn, but leave out the KL penalty: it needs the reference model.

    Args:
      sampler, sampling, num_prompts, k: as of `evaluate`.
      network, critic: the critic's network and its weights.
      report: called with "critic", the completions done and all there will be.
    """
    # Training shares prompts in groups of its own size, which `k` need not be.
    recipe, objective = network.objective.recipe, network.objective.for_separate_rows()
    examples = numbered_heldout(heldout_examples(sampler.task, num_prompts))
    report("critic", 0, len(examples) * k)
    # Prompts that are decoded and scored at a time divide over the devices.
    unit = ranks(network.mesh)
    size = min(len(examples), max(1, MAX_ROWS_PER_CALL // k)) // unit * unit or unit
    batches = []
    for start in range(0, len(examples), size):
        batch_examples = dict(islice(examples.items(), start, start + size))
        completions = sampler.sample(batch_examples, sampling, k)
        # The last batch is padded to divide over the devices; padding is removed below.
        rows = pad_with_repeats(completions, size * k)
        all_rows = np.ones(len(rows), bool)
        batch = batch_of_completions(sampler, rows, all_rows, network.mesh)
        batch = add_verdicts(
            batch,
            rows,
            scores_of(rows),
            correct_of(rows),
            recipe,
            objective.response_length,
            network.mesh,
        )
        values = values_of(objective, critic, batch.tokens, batch.valid)
        # The critic was trained to predict rewards of the recipe, not scores.
        arrays = to_host((values, _rewards(batch), batch.mask, batch.lengths))
        columns = (*arrays, correct_of(rows), groups_of(rows))
        batches.append([column[: len(completions)] for column in columns])
        report("critic", min(start + size, len(examples)) * k, len(examples) * k)
    arrays_of_all = map(np.concatenate, zip(*batches, strict=True))
    values, rewards, mask, lengths, correct, groups = arrays_of_all
    return CriticRollout(
        values=values,
        rewards=rewards,
        mask=np.asarray(mask, bool),
        correct=correct,
        groups=-1 - groups,  # ids of held-out prompts count down from -1
        lam=np.asarray(recipe.policy_lambda(jnp.asarray(lengths))),
        gamma=recipe.discount,
        low=recipe.reward_wrong,
        high=recipe.reward_correct,
        alpha=recipe.length_adaptive_alpha,
    )
