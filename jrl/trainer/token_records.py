"""What is kept of the tokens of completions that people look at: their advantages, and what the
policy that sampled them says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import Batch, given
from jrl.rollout.batching import take_rows
from jrl.rollout.collection.collect import shown_rows
from jrl.rollout.decoding.ranks import ranks
from jrl.rollout.sampler import Completion
from jrl.text.pieces import pieces
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.scoring import logprobs_and_entropy_of_few
from jrl.trainer.setup.networks import Networks
from moe.weights import Transformer

DIGITS = 4
"""Significant digits of a number in samples.jsonl: it is looked at, nothing is computed from it."""


class Watched(NamedTuple):
    """How much of a step is kept to look at.

    Attributes:
      completions: how many.
      tokens: of each of them at most, the first.
    """

    completions: int
    tokens: int


@dataclass(frozen=True)
class TokenRecord:
    """Of one completion, ``[token]`` from the first of its response on.

    Attributes:
      ids: of the tokens that are kept.
      length: of the whole response, in tokens.
      advantage: as the policy's loss sees it; NaN where a token counts for no loss.
      sampler_logprob: of the whole policy at the base temperature, as the sampler computed it,
        nats; NaN where the token was sampled in an earlier step.
      gap: the same by the trainer's code before the step's first update, less the sampler's, nats.
      entropy: of that distribution before the token, nats.
    """

    ids: np.ndarray
    length: int
    advantage: np.ndarray
    sampler_logprob: np.ndarray
    gap: np.ndarray
    entropy: np.ndarray

    def record(self, tokenizer: Tokenizer) -> dict[str, object]:
        """As samples.jsonl holds it, under "tokens"."""
        columns = "advantage", "sampler_logprob", "gap", "entropy"
        return {
            "text": pieces(tokenizer, self.ids.tolist()),
            "of": self.length,
            **{name: [_short(x) for x in getattr(self, name)] for name in columns},
        }


def token_records(
    networks: Networks,
    policy: Transformer[Array],
    completions: Sequence[Completion],
    as_sampled: Batch[Array],
    batch: Batch[Array],
    watched: Watched,
) -> dict[int, TokenRecord]:
    """The tokens of some rows of a step, by one forward pass over these rows alone.

    Args:
      policy: before the updates.
      completions: the rows.
      as_sampled: the batch as the sampler gave it.
      batch: the same as `prepare` gives it, with advantages.

    Returns:
      The rows of `shown`, by their numbers.
    """
    mesh, objective = networks.mesh, networks.policy.objective
    chosen = shown_rows(completions, watched.completions)
    # They divide over the devices, and none shares its prompt with another.
    num_rows = -(-len(chosen) // ranks(mesh)) * ranks(mesh)
    numbers = np.resize(np.asarray(chosen, np.int32), num_rows)
    layout = objective.layout._replace(group_size=1)
    objective = replace(objective, layout=layout, packed=None)
    columns = Batch(
        tokens=batch.tokens,
        valid=batch.valid,
        mask=batch.mask,
        # Any free column would do: the mask as it was before `prepare` travels along with the rows.
        critic_mask=as_sampled.mask,
        old_logprobs=as_sampled.old_logprobs,
        advantages=batch.advantages,
        choices=batch.choices,
    )
    rows = take_rows(columns, numbers, mesh)
    scored = logprobs_and_entropy_of_few(
        objective, policy, rows.tokens, rows.valid, objective.replayed(rows)
    )
    # Choices of experts are the largest column, and nobody looks at them.
    logprobs, entropy, rows = to_host((*scored, replace(rows, choices=None)))
    records = {}
    for place, row in enumerate(chosen):
        length, begin = completions[row].length, layout.prompt_length
        kept = slice(begin, begin + min(length, watched.tokens))
        counts, drawn = rows.mask[place, kept], given(rows.critic_mask)[place, kept]
        # Of a group that does not count nothing is under the mask, and all of it was drawn.
        drawn = drawn | ~given(rows.critic_mask)[place].any()
        sampled = np.where(drawn, given(rows.old_logprobs)[place, kept], np.nan)
        records[row] = TokenRecord(
            ids=rows.tokens[place, kept],
            length=length,
            advantage=np.where(counts, given(rows.advantages)[place, kept], np.nan),
            sampler_logprob=sampled,
            gap=logprobs[place, kept] - sampled,
            entropy=entropy[place, kept],
        )
    return records


def _short(x: float | np.floating) -> float:
    return float(f"{x:.{DIGITS}g}")
