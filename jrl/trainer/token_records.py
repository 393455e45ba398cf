"""Token records of the completions in samples.jsonl: advantages, log-probabilities and entropies
under the policy that sampled them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import TEACHER, Batch, required, take_rows
from jrl.rollout.collection.collect import shown_rows
from jrl.rollout.decoding.slots import ranks
from jrl.rollout.sampler import Completion
from jrl.text.prompt_format import token_texts
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.learner.networks import Networks
from jrl.trainer.scoring import logprobs_and_entropy_of_few
from moe.weights import Transformer

DIGITS = 4
"""Significant digits of a number in samples.jsonl, a file for people."""


class TokenLogConfig(NamedTuple):
    """Size of a step's token records.

    Attributes:
      completions: number of completions.
      tokens: maximum number of tokens of each, the first ones.
    """

    completions: int
    tokens: int


@dataclass(frozen=True)
class TokenRecord:
    """Token records of one completion, ``[token]`` from the first of its response on.

    Attributes:
      ids: ids of the recorded tokens.
      length: length of the whole response, in tokens.
      advantage: as in the policy's loss; NaN for tokens outside of the loss mask.
      sampler_logprob: in the full policy at the base temperature, as computed by the sampler, nats;
        NaN for tokens of an earlier step.
      gap: the trainer's log-probability before the step's first update minus the sampler's, nats.
      entropy: entropy of that distribution before the token, nats.
      teacher: the teacher's log-probability minus the sampler's, nats; None if there is no teacher.
    """

    ids: np.ndarray
    length: int
    advantage: np.ndarray
    sampler_logprob: np.ndarray
    gap: np.ndarray
    entropy: np.ndarray
    teacher: np.ndarray | None = None

    def record(self, tokenizer: Tokenizer) -> dict[str, object]:
        """JSON object for the field "tokens" of samples.jsonl."""
        columns = ["advantage", "sampler_logprob", "gap", "entropy"]
        columns += [] if self.teacher is None else ["teacher"]
        return {
            "text": token_texts(tokenizer, self.ids.tolist()),
            "of": self.length,
            **{name: [_short(x) for x in getattr(self, name)] for name in columns},
        }


def token_records(
    networks: Networks,
    policy: Transformer[Array],
    completions: Sequence[Completion],
    as_sampled: Batch[Array],
    batch: Batch[Array],
    token_log: TokenLogConfig,
) -> dict[int, TokenRecord]:
    """Makes token records of some rows of a step, by one forward pass over these rows only.

    Args:
      policy: before the updates.
      completions: the rows.
      as_sampled: the batch of the sampler.
      batch: the same after `prepare`, with advantages.

    Returns:
      The records of the rows that `shown_rows` selects, by row index.
    """
    # The shown rows do not share prompts.
    mesh, objective = networks.mesh, networks.policy.objective.for_separate_rows()
    row_indices = shown_rows(completions, token_log.completions)
    # Padded to divide over the devices.
    num_rows = -(-len(row_indices) // ranks(mesh)) * ranks(mesh)
    gathered_rows = np.resize(np.asarray(row_indices, np.int32), num_rows)
    needed = Batch(
        *(batch.tokens, batch.valid, batch.mask),
        # An unused field, which carries the mask from before `prepare`.
        critic_mask=as_sampled.mask,
        old_logprobs=as_sampled.old_logprobs,
        advantages=batch.advantages,
        logprobs={role: x for role, x in batch.logprobs.items() if role == TEACHER},
        choices=batch.choices,
    )
    rows = take_rows(needed, gathered_rows, mesh)
    scored = logprobs_and_entropy_of_few(
        objective, policy, rows.tokens, rows.valid, objective.replayed(rows)
    )
    # Expert ids are the largest array, and are not needed.
    logprobs, entropy, rows = to_host((*scored, replace(rows, choices=None)))
    records = {}
    for index, row in enumerate(row_indices):
        length, begin = completions[row].length, objective.layout.prompt_length
        recorded = slice(begin, begin + min(length, token_log.tokens))
        in_loss = rows.mask[index, recorded]
        was_sampled = required(rows.critic_mask)[index, recorded]
        # A group outside of the loss has an empty mask, but all its tokens were sampled.
        was_sampled = was_sampled | ~required(rows.critic_mask)[index].any()
        sampled = np.where(was_sampled, required(rows.old_logprobs)[index, recorded], np.nan)
        teacher = rows.logprobs.get(TEACHER)
        records[row] = TokenRecord(
            ids=rows.tokens[index, recorded],
            length=length,
            advantage=np.where(in_loss, required(rows.advantages)[index, recorded], np.nan),
            sampler_logprob=sampled,
            gap=logprobs[index, recorded] - sampled,
            entropy=entropy[index, recorded],
            teacher=None if teacher is None else teacher[index, recorded] - sampled,
        )
    return records


def _short(x: float | np.floating) -> float:
    return float(f"{x:.{DIGITS}g}")
