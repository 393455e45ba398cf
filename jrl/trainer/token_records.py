"""What is kept of the tokens of completions that people look at: their advantages, and what the
policy that sampled them says of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import Batch, given
from jrl.rollout.batching import take_rows
from jrl.text.pieces import pieces
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.scoring import logprobs_and_entropy_of
from jrl.trainer.setup.networks import Networks
from moe.weights import Transformer

DIGITS = 4
"""Significant digits of a number in samples.jsonl: it is looked at, nothing is computed from it."""


@dataclass(frozen=True)
class TokenRecord:
    """Of one completion, ``[token]`` from the first of its response on.

    Attributes:
      ids: of the tokens that are kept.
      length: of the whole response, in tokens.
      advantage: as the policy's loss sees it; 0 where a token does not count.
      sampler_logprob: of the whole policy at the base temperature, as the sampler computed it,
        nats.
      logprob: the same by the trainer's code, nats.
      entropy: of that distribution before the token, nats.
    """

    ids: np.ndarray
    length: int
    advantage: np.ndarray
    sampler_logprob: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray

    def record(self, tokenizer: Tokenizer) -> dict[str, object]:
        """As samples.jsonl holds it, under "tokens"."""
        columns = {
            "advantage": self.advantage,
            "sampler_logprob": self.sampler_logprob,
            "logprob": self.logprob,
            "entropy": self.entropy,
        }
        return {
            "text": pieces(tokenizer, self.ids.tolist()),
            "of": self.length,
            **{name: [_short(x) for x in column] for name, column in columns.items()},
        }


def token_records(
    networks: Networks,
    policy: Transformer[Array],
    as_sampled: Batch[Array],
    batch: Batch[Array],
    chosen: Sequence[int],
    prompt_length: int,
    most: int,
) -> list[TokenRecord]:
    """The tokens of some rows of a step, by one forward pass over these rows.

    Args:
      policy: that sampled them.
      as_sampled: the batch as the sampler gave it.
      batch: the same rows as `prepare` gives them, with advantages.
      chosen: which rows.
      prompt_length: columns before the responses.
      most: tokens that are kept of a response, its first.
    """
    mesh, objective = networks.mesh, networks.policy.objective
    num_rows = len(batch.tokens)
    # Whole groups, as many as a device has of a step: what shares a prompt stands together, and the
    # rows divide over the devices and over micro-batches as those of a step do.
    needed = [row % num_rows for row in chosen]
    rows = take_rows(
        Batch(
            tokens=batch.tokens,
            valid=batch.valid,
            mask=as_sampled.mask,
            old_logprobs=as_sampled.old_logprobs,
            advantages=batch.advantages,
            choices=batch.choices,
        ),
        np.arange(num_rows),
        mesh,
    )
    logprobs, entropy = logprobs_and_entropy_of(
        objective, policy, rows.tokens, rows.valid, objective.replayed(rows)
    )
    return needed  # type: ignore
