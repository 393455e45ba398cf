"""Adjustments of the logits of single rows before sampling: top-k, min-p, penalties, biases, and
the tokens that a constraint allows.

They are arrays with an entry per row, so that requests with any values share one compiled function.
A row with neutral values has the logits that it would have without them, bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Leaf = TypeVar("Leaf")

MAX_BIASES = 300
"""Limit of the tokens with a bias in one row."""
WORD_BITS = 32


@runtime_checkable
class Constraint(Protocol):
    """Tokens that a row may continue with, for example the next tokens of a grammar."""

    def allowed(self) -> np.ndarray:
        """Allowed next tokens, one at least: ``[word]`` bits, the first token in the lowest bit."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Called with the tokens that the row was continued with."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason for which it allows no more than the end of the row; None if it has not failed."""
        return None


class Adjustments(NamedTuple):
    """Adjustments of one request; the defaults change nothing.

    Attributes:
      top_k: keeps only this many of the most probable tokens, and ties with the last; 0 keeps all.
      min_p: keeps tokens with at least this fraction of the probability of the most probable one.
      presence_penalty: subtracted from the logits of tokens in the completion so far.
      frequency_penalty: the same, times the number of their occurrences.
      repetition_penalty: divides positive logits of tokens in prompt and completion so far, and
        multiplies negative ones.
      biases: pairs of a token and a number that is added to its logit, at most `MAX_BIASES`.
      constraint: tokens that are allowed; None allows all.
    """

    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    biases: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None


NO_ADJUSTMENTS = Adjustments()


@struct.dataclass
class RowAdjustments(Generic[Leaf]):
    """`Adjustments` of each row.

    Attributes:
      top_ks, min_ps, presence, frequency, repetition: ``[row]``.
      bias_tokens: ``[row, bias]``; the vocabulary size if an entry has no bias.
      bias_values: ``[row, bias]``.
      constrained: ``[row]`` true if only some tokens are allowed.
      allowed: ``[row, word]`` bits of these.
    """

    top_ks: Leaf
    min_ps: Leaf
    presence: Leaf
    frequency: Leaf
    repetition: Leaf
    bias_tokens: Leaf
    bias_values: Leaf
    constrained: Leaf
    allowed: Leaf


def stack_adjustments(
    of_rows: Mapping[int, Adjustments | None], rows: int, vocab_size: int
) -> RowAdjustments[np.ndarray] | None:
    """Adjustments of rows, an entry for each; None if no row has any."""
    adjusted = {row: each for row, each in of_rows.items() if each is not None}
    if not adjusted:
        return None
    parameters = [adjusted.get(row, NO_ADJUSTMENTS) for row in range(rows)]

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(each, name) for each in parameters], dtype)

    stacked = RowAdjustments(
        top_ks=column("top_k", np.int32),
        min_ps=column("min_p", np.float32),
        presence=column("presence_penalty", np.float32),
        frequency=column("frequency_penalty", np.float32),
        repetition=column("repetition_penalty", np.float32),
        bias_tokens=np.full((rows, MAX_BIASES), vocab_size, np.int32),
        bias_values=np.zeros((rows, MAX_BIASES), np.float32),
        constrained=np.array([each.constraint is not None for each in parameters]),
        allowed=np.zeros((rows, -(-vocab_size // WORD_BITS)), np.uint32),
    )
    for row, each in adjusted.items():
        if each.biases:
            tokens, values = zip(*each.biases, strict=True)
            stacked.bias_tokens[row, : len(tokens)] = tokens
            stacked.bias_values[row, : len(tokens)] = values
        if each.constraint is not None:
            stacked.allowed[row] = each.constraint.allowed()
    return stacked


def adjust_logits(
    logits: Float[Array, "row vocab"],
    adjustments: RowAdjustments[Array],
    tokens: Int[Array, "row column"],
    responses: Int[Array, "row"],
    lengths: Int[Array, "row"],
) -> Float[Array, "row vocab"]:
    """Logits with biases, penalties and constraints, in this order; -inf for tokens that are not
    allowed.

    Args:
      tokens: ids of each row so far.
      responses: column of the first token of the completion.
      lengths: tokens so far.

    References:
      Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation",
      2019 (repetition penalty). https://arxiv.org/abs/1909.05858
    """
    biased = logits.at[jnp.arange(logits.shape[0])[:, None], adjustments.bias_tokens].add(
        adjustments.bias_values, mode="drop"
    )

    def penalise() -> Array:
        columns, rows = jnp.arange(tokens.shape[1])[None], jnp.arange(tokens.shape[0])[:, None]
        so_far = columns < lengths[:, None]
        generated = so_far & (columns >= responses[:, None])

        def count(mask: Bool[Array, "row column"]) -> Float[Array, "row vocab"]:
            zeros = jnp.zeros_like(biased)
            return zeros.at[rows, tokens].add(mask.astype(biased.dtype), mode="drop")

        repetition = adjustments.repetition[:, None]
        scaled = jnp.where(biased > 0, biased / repetition, biased * repetition)
        repeated = jnp.where(count(so_far) > 0, scaled, biased)
        counts = count(generated)
        frequency, presence = adjustments.frequency[:, None], adjustments.presence[:, None]
        return repeated - frequency * counts - presence * (counts > 0).astype(biased.dtype)

    penalties = (adjustments.presence != 0) | (adjustments.frequency != 0)
    penalties |= adjustments.repetition != 1
    penalised = jax.lax.cond(jnp.any(penalties), penalise, lambda: biased)

    def constrain() -> Array:
        vocab = np.arange(logits.shape[1])
        bits = (vocab % WORD_BITS).astype(np.uint32)[None]
        allowed = (adjustments.allowed[:, vocab // WORD_BITS] >> bits & 1) > 0
        return jnp.where(allowed | ~adjustments.constrained[:, None], penalised, -jnp.inf)

    return jax.lax.cond(jnp.any(adjustments.constrained), constrain, lambda: penalised)


def apply_top_k_and_min_p(
    logits: Float[Array, "row vocab"], adjustments: RowAdjustments[Array]
) -> Float[Array, "row vocab"]:
    """Sets the logits of tokens outside of the top-k, or below min-p, to -inf.

    References:
      Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs",
      2024. https://arxiv.org/abs/2407.01082
    """
    ordered = -jnp.sort(-logits, axis=-1)
    # p >= m max(p) in the logarithm; the most probable token stays whatever the rounding.
    least = ordered[:, :1] + jnp.log(adjustments.min_ps)[:, None]
    last = jnp.clip(adjustments.top_ks - 1, 0, logits.shape[1] - 1)[:, None]
    of_last = jnp.take_along_axis(ordered, last, axis=1)
    least = jnp.where(adjustments.top_ks[:, None] > 0, jnp.maximum(least, of_last), least)
    return jnp.where(logits >= least, logits, -jnp.inf)
