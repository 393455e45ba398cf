"""Evaluation of a policy on held-out prompts: k sampled completions of each, and a greedy one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from jrl.losses import pass_at_k
from jrl.rollout.completion_metrics import (
    conversation_metrics,
    reward_means,
    task_metrics,
)
from jrl.rollout.sampler import Completion, Sampler, correct_of, lengths_of, numbered_heldout
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import REASONS
from jrl.trainer.evaluation.heldout import heldout_examples
from sharding.former_names import former_keywords

Report = Callable[[str, int, int], None]
"""Callback for the progress of an evaluation: the phase, completions done, and their total."""
OnCompletions = Callable[[str, list[Completion]], None]
"""Callback with the completions of a phase, when all of them are verified."""


@former_keywords(found="on_completions")
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

    Args:
      sampler: with the policy loaded.
      sampling: sampling parameters of the `k` completions of a prompt.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt; pass@k is given for 1, 2, 4, ... and `k`.
      report: called with "sampled" or "greedy", the completions done and all there will be.
      on_completions: called with "sampled" or "greedy" and its completions, those of a prompt
        together.

    Returns:
      Numbers by name; those of length and of the verifier are about the sampled completions.
    """
    examples = numbered_heldout(heldout_examples(sampler.task, num_prompts))

    def complete(phase: str, sampling: Sampling, number: int) -> list[Completion]:
        def decoded(done: int) -> None:
            report(phase, done, len(examples) * number)

        decoded(0)
        completions = sampler.sample(examples, sampling, number, report=decoded)
        on_completions(phase, completions)
        return completions

    sampled, greedy = complete("sampled", sampling, k), complete("greedy", GREEDY, 1)
    # In float64: these are averaged and printed, and are part of no loss.
    scores = np.array([completion.score for completion in sampled])
    best = np.array([completion.score for completion in greedy])
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
        "score/sampled": scores.mean(),
        "score/greedy": best.mean(),
        **{
            f"pass@{n}": np.mean([float(pass_at_k(k, c, n)) for c in counts])
            for n in _powers_up_to(k)
        },
        "response_length/mean": lengths_of(sampled).mean(),
        "response_length/clip_ratio": np.mean([completion.truncated for completion in sampled]),
        **{f"verifier/{reason}": reasons[reason] for reason in REASONS},
    }
    results |= (
        reward_means(sampled) | task_metrics(sampled, "sampled") | task_metrics(greedy, "greedy")
    )
    results |= conversation_metrics(sampled)
    return {name: np.asarray(value).item() for name, value in results.items()}


def _powers_up_to(k: int) -> Iterator[int]:
    """Powers of two below `k`, and `k` itself."""
    power = 1
    while power < k:
        yield power
        power *= 2
    yield k
