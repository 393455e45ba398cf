"""Loss aggregation: reduction of per-token losses to a scalar, and metrics that add up.

A denominator counted in a micro-batch makes the loss depend on how the batch was split. The caller
may pass the counts of the *whole* batch instead; then the sum over micro-batches or devices equals
the loss of the whole batch, in value and gradient. Metrics are pairs (sum, count) for the same
reason.
"""

import difflib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    check_shapes,
    num_true,
    row_lengths,
    zero_masked,
)

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

EmptyRows = Literal["skip", "count"]


class Denominators(TypedDict, total=False):
    """Keywords of `aggregate` after the mode, which every loss passes on unchanged."""

    num_tokens: Scalar | None
    num_sequences: Scalar | None
    max_length: Number | None
    sequence_lengths: Real[ArrayLike, "*batch time"] | None
    empty_rows: EmptyRows


Leaf = TypeVar("Leaf")
Sums = TypeVar("Sums", bound="Additive")


class Additive:
    """Record of sums: records of micro-batches add up with ``+`` or ``sum``, leaf by leaf.

    Over devices, apply ``jax.lax.psum`` to the record.
    """

    def __add__(self: Sums, other: Sums) -> Sums:
        return jax.tree.map(operator.add, self, other)

    def merge(self: Sums, other: Sums) -> Sums:
        """The record of both."""
        return self + other

    def __radd__(self: Sums, other: Literal[0]) -> Sums:
        # Python's `sum` begins with 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean(Additive, Generic[Leaf]):
    """Mean as a pair of sum and count, which adds up exactly over micro-batches and devices.

    Records add with ``+`` or ``sum``; over devices, apply ``jax.lax.psum`` to the record. A mean of
    means, by contrast, is wrong if micro-batches have different numbers of tokens.

    Attributes:
      sum: sum over the unmasked entries.
      count: number of them; an integer, as float32 counts exactly only up to 2**24.

    Examples:
      >>> first = Mean.of(jnp.array([1.0, 2.0, 3.0]), jnp.array([1, 1, 1]))
      >>> second = Mean.of(jnp.array([10.0, 99.0, 99.0]), jnp.array([1, 0, 0]))
      >>> float(sum([first, second]).value())
      4.0
    """

    sum: Leaf
    count: Leaf

    @classmethod
    def of(cls, x: Shaped[ArrayLike, "*shape"], mask: Shaped[ArrayLike, "*shape"]) -> "Mean[Array]":
        """Mean of `x` where `mask` is true (gradient stopped)."""
        mask = as_mask(mask)
        (x,) = as_floats(jax.lax.stop_gradient(x))
        return Mean(sum=jnp.sum(zero_masked(x, mask)), count=num_true(mask))

    def value(self) -> Float[Array, ""]:
        """The mean; 0 if the count is 0."""
        return divide(jnp.asarray(self.sum), jnp.asarray(self.count))


def divide(total: Float[Array, "*shape"], count: Scalar) -> Float[Array, "*shape"]:
    """`total / count`, and `total` itself where the count is 0 (an empty sum is 0)."""
    count = jnp.asarray(count, total.dtype)
    return total / jnp.where(count == 0, 1, count)


def masked_mean(
    x: Shaped[ArrayLike, "*shape"], mask: Shaped[ArrayLike, "*shape"], axis: int | None = None
) -> Float[Array, "..."]:
    """Mean of `x` where `mask` is true, over all axes or along one.

    Args:
      x: real numbers; masked entries are ignored, NaN and inf included.
      mask: true on the entries of `x` to average.
      axis: the axis to reduce; None reduces all of them.

    Returns:
      ``sum(mask * x) / sum(mask)``, and 0 where the mask is false throughout.
    """
    check_shapes(x=x, mask=mask)
    mask = as_mask(mask)
    (x,) = as_floats(x)
    count = num_true(mask, axis).astype(x.dtype)
    return jnp.sum(zero_masked(x, mask), axis=axis) / jnp.maximum(count, 1)


def aggregate(
    per_token: Real[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    mode: Aggregation = "token-mean",
    *,
    num_tokens: Scalar | None = None,
    num_sequences: Scalar | None = None,
    max_length: Number | None = None,
    sequence_lengths: Real[ArrayLike, "*batch time"] | None = None,
    empty_rows: EmptyRows = "skip",
) -> Float[Array, ""]:
    """Aggregates per-token losses to a scalar loss.

    With ``l`` the loss of a token, ``n_i`` the number of unmasked tokens in row i, and ``N`` and
    ``S`` the numbers of unmasked tokens and of sequences in the batch:

    | mode | value | used in |
    |---|---|---|
    | ``token-mean`` | ``sum_it l / N`` | DAPO, VAPO |
    | ``token-sum`` | ``sum_it l`` | |
    | ``seq-mean-token-sum`` | ``sum_it l / S`` | REINFORCE |
    | ``seq-mean-token-mean`` | ``sum_i (sum_t l / n_i) / S`` | GRPO, PPO per response |
    | ``seq-mean-token-sum-norm`` | ``sum_it l / (S * max_length)`` | Dr. GRPO |

    A row is a sequence. Fully masked rows are not counted in S, unless `empty_rows` is "count".
    If all rows are fully masked, the result and its gradient are 0.

    **Gradient accumulation.** `num_tokens` and `num_sequences` are N and S of the whole batch. If
    every micro-batch gets them, the sum over micro-batches equals the loss of the whole batch, in
    value and gradient. Each mode reads the one that it needs, so both may always be passed. If a
    row has part of a sequence (split along time) or several sequences (packing),
    `seq-mean-token-mean` also needs `sequence_lengths`.

    Args:
      per_token: the loss of each token.
      mask: loss mask; true on the tokens in the loss.
      mode: the weighting of tokens and sequences, see the table.
      num_tokens: N; counted in `mask` if None.
      num_sequences: S; if None, the number of rows with an unmasked token.
      max_length: the constant of `seq-mean-token-sum-norm`, in tokens: the maximum response length,
        not the width of this batch, which varies.
      sequence_lengths: for each token, the number of unmasked tokens in its whole sequence; used by
        `seq-mean-token-mean` only. ``n_i`` of the row if None.
      empty_rows: "skip" leaves fully masked rows out of S, as verl does; "count"
        counts them, as TRL does. No effect if `num_sequences` is given.

    Returns:
      The loss, in float32 (float64 if `per_token` is).

    Raises:
      ValueError: if the mode or `empty_rows` is unknown, `max_length` is missing or not positive
        although needed, or `sequence_lengths` is used without `num_sequences`, which cannot be
        counted from rows then.

    References:
      Yu et al., "DAPO", 2025, section 3.3. https://arxiv.org/abs/2503.14476
      Liu et al., "Understanding R1-Zero-like training", 2025. https://arxiv.org/abs/2503.20783

    Examples:
      >>> loss = jnp.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 0.0, 0.0]])
      >>> mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0]])
      >>> [float(aggregate(loss, mask, mode)) for mode in ("seq-mean-token-mean", "token-sum")]
      [8.75, 40.0]
      >>> halves = [aggregate(loss[i], mask[i], num_tokens=6) for i in (0, 1)]
      >>> round(float(sum(halves)), 4) == round(float(aggregate(loss, mask)), 4)
      True
    """
    settings.choice("mode", mode, Aggregation, "an aggregation mode")
    settings.choice("empty_rows", empty_rows, EmptyRows)
    check_shapes(per_token=per_token, mask=mask)
    num_tokens = settings.count("num_tokens", num_tokens, "tokens")
    num_sequences = settings.count("num_sequences", num_sequences, "sequences")
    mask = as_mask(mask)
    (per_token,) = as_floats(per_token)
    per_token = zero_masked(per_token, mask)

    if mode == "token-sum":
        return jnp.sum(per_token)
    if mode == "token-mean":
        tokens = num_true(mask) if num_tokens is None else num_tokens
        return divide(jnp.sum(per_token), tokens)

    if mode == "seq-mean-token-sum-norm":
        rule = f"cannot normalise {mode}: give the longest response that is allowed, in tokens."
        if max_length is None:
            raise ValueError(f"max_length=None {rule}")
        per_token = per_token / settings.number("max_length", max_length, rule, above=0)
    if mode == "seq-mean-token-mean":
        lengths = row_lengths(mask, per_token)
        if sequence_lengths is not None:
            if num_sequences is None:
                raise ValueError(
                    "sequence_lengths without num_sequences: a row is not a sequence here, so rows "
                    "cannot be counted; pass the number of sequences in the global batch."
                )
            check_shapes(per_token=per_token, sequence_lengths=sequence_lengths)
            lengths = jnp.where(mask, jnp.asarray(sequence_lengths, per_token.dtype), 1)
        per_token = per_token / lengths
    counted = jnp.any(mask, axis=-1) if empty_rows == "skip" else jnp.ones(mask.shape[:-1], bool)
    rows = num_true(counted)
    return divide(jnp.sum(per_token), rows if num_sequences is None else num_sequences)


def check_denominators(loss: Callable[..., Any], denominators: Mapping[str, Any]) -> None:
    """Checks that the keywords that `loss` passes on to `aggregate` are denominators, not typos."""
    parameters = {
        n for n, p in inspect.signature(loss).parameters.items() if p.kind != p.VAR_KEYWORD
    }
    takes = sorted(parameters | set(Denominators.__annotations__))
    for name in denominators:
        if name not in Denominators.__annotations__:
            near = difflib.get_close_matches(name, takes, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(takes)}."
            raise TypeError(f"{loss.__name__}() got an unexpected keyword {name!r}: {fix}")
