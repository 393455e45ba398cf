"""Off-policy correction: importance-sampling weights, rejection masks and mismatch metrics.

They correct for the difference between the sampler's and the trainer's probabilities. ``w`` is
always the ratio trainer over sampler, and all ranges bound that ratio. No result has a gradient.
"""

from dataclasses import dataclass
from typing import Generic, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_mask,
    masked_constants,
    num_true,
    row_lengths,
    zero_masked,
)
from jrl.losses.reduction import Additive, Leaf, Mean, divide

__all__ = [  # noqa: RUF022 - in reading order
    "mismatch_weights",
    "WeightLevel",
    "truncated_weights",
    "icepop_weights",
    "sequence_masked_weights",
    "normalized_weights",
    "WeightMean",
    "geometric_rejection_mask",
    "divergence_rejection_mask",
    "RejectionKind",
    "RejectionOver",
    "mismatch_statistics",
    "EffectiveSampleSize",
]

WeightLevel = Literal["token", "sequence", "geometric"]
WeightMean = Literal["token", "sequence"]
RejectionKind = Literal["k2", "k3"]
RejectionOver = Literal["token", "sum", "mean", "max"]


def mismatch_weights(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    level: WeightLevel = "token",
    max_log_weight: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Importance-sampling weights for the mismatch between sampler and trainer.

    With ``log w_t = logprobs - behaviour_logprobs``, trainer over sampler,

    | level | weight of each token | correction |
    |---|---|---|
    | ``token`` | ``w_t`` | of each token separately: biased, low variance |
    | ``sequence`` | ``prod_t w_t``, for the whole row | of the sequence: unbiased, high variance |
    | ``geometric`` | ``exp(mean_t log w_t)``, likewise | not exact; independent of length |

    A factor of 1.1 per token is 2.6 after 10 tokens and 14000 after 100.

    If the loss has a ratio of current to old policy, pass as `logprobs` the log-probabilities of
    the *old* policy, recomputed by the trainer before its first step (three policies, "decoupled").
    Otherwise pass the log-probabilities of the current policy (two policies). A PPO loss whose
    ratio is taken against the sampler would be corrected twice by these weights.

    Bound the weights by `truncated_weights` or `icepop_weights` and pass them to a loss as
    `importance_weights`.

    Args:
      logprobs: of the sampled tokens as computed by the trainer, in nats; no gradient.
      behaviour_logprobs: the same as recorded by the sampler, at its temperature; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      level: the level of the ratio, see the table.
      max_log_weight: clamps log-weights to plus or minus this; None disables it.

    Returns:
      One weight per token (gradient stopped); 0 where the mask is false.

    Raises:
      ValueError: if `level` is unknown.

    References:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
      https://fengyao.notion.site/off-policy-rl

    Examples:
      >>> log_weights = jnp.log(jnp.array([[2.0, 4.0], [0.5, 1.0]]))
      >>> mask = jnp.array([[1, 1], [1, 0]])
      >>> mismatch_weights(log_weights, 0 * log_weights, mask, level="sequence").tolist()
      [[8.0, 8.0], [0.5, 0.0]]
    """
    settings.choice("level", level, WeightLevel, "a level of weights")
    max_log_weight = settings.optional_distance("max_log_weight", max_log_weight)
    log_weights, mask = log_ratio(logprobs, behaviour_logprobs, mask)
    if level != "token":
        log_weights = jnp.sum(log_weights, axis=-1, keepdims=True)
        if level == "geometric":
            log_weights = log_weights / row_lengths(mask, log_weights)
        log_weights = jnp.broadcast_to(log_weights, mask.shape)
    if max_log_weight is not None:
        log_weights = jnp.clip(log_weights, -max_log_weight, max_log_weight)
    return zero_masked(jnp.exp(log_weights), mask)


def truncated_weights(
    weights: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    high: Number | None = 2.0,
    low: Number | None = None,
) -> Float[Array, "*batch time"]:
    """Truncated importance-sampling (TIS) weights, clamped to a range.

        min(w, high), and max(., low) if it is set

    With token weights this is token TIS, with sequence weights sequence TIS. verl's default is 2
    (1.5 to 5 are common for tokens, 2 to 10 for sequences); OpenRLHF clamps to [0.5, 5].

    Args:
      weights: trainer over sampler, of `mismatch_weights`; no gradient.
      mask: true on sampled tokens.
      high: upper bound; None disables it.
      low: lower bound; None disables it.

    Returns:
      One weight per token (gradient stopped); 0 where the mask is false.

    Raises:
      ValueError: if the range is empty or negative.

    References:
      Ionides, "Truncated importance sampling", 2008. Yao et al., 2025, as for `mismatch_weights`.

    Examples:
      >>> truncated_weights(jnp.array([0.25, 1.5, 7.0, 9.0]), jnp.array([1, 1, 1, 0])).tolist()
      [0.25, 1.5, 2.0, 0.0]
    """
    low, high = weight_range(low, high)
    mask, (weights,) = masked_constants(mask, weights=weights)
    if low is not None or high is not None:
        weights = jnp.clip(weights, low, high)
    return zero_masked(weights, mask)


def icepop_weights(
    weights: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    low: Number | None = 0.5,
    high: Number | None = 5.0,
) -> Float[Array, "*batch time"]:
    """Masked importance-sampling (MIS) weights, as in IcePop: 0 outside a range.

        w where low <= w <= high, and 0 elsewhere

    With token weights this is IcePop or token MIS; with sequence weights it is sequence MIS, TRL's
    default with `high` 3 and no `low`. A token of weight 0 has no gradient but remains in the
    denominators of the loss; a rejection mask removes it from those too.

    The range bounds trainer over sampler. verl's thresholds for rejection by k1 bound ``-log w``:
    its "0.5_2.0" is a range of the log of sampler over trainer.

    Args:
      weights: trainer over sampler, of `mismatch_weights`; no gradient.
      mask: true on sampled tokens.
      low: smallest weight that is not masked; None disables it. 0.5 in verl's preset and OpenRLHF.
      high: largest weight that is not masked; None disables it. 5 in both.

    Returns:
      One weight per token (gradient stopped); 0 where the mask is false.

    Raises:
      ValueError: if the range is empty or negative.

    References:
      Ling team, "Every step evolves", 2025 (IcePop). https://arxiv.org/abs/2510.18855

    Examples:
      >>> icepop_weights(jnp.array([0.25, 0.5, 5.0, 7.0]), jnp.ones(4)).tolist()
      [0.0, 0.5, 5.0, 0.0]
    """
    low, high = weight_range(low, high)
    mask, (weights,) = masked_constants(mask, weights=weights)
    return zero_masked(weights, mask & ~outside(weights, low, high))


def normalized_weights(
    weights: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    over: WeightMean = "token",
    mean: Scalar | None = None,
) -> Float[Array, "*batch time"]:
    """Self-normalised importance-sampling weights: divided by their mean over the batch.

    Truncation lowers the mean of the weights, and with it the step size; this restores it.

    | over | mean |
    |---|---|
    | ``token`` | over the weights of all tokens in the mask |
    | ``sequence`` | over the sequences, of the mean weight within each |

    Args:
      weights: after truncation; no gradient.
      mask: true on sampled tokens.
      over: the unit of the mean, see the table.
      mean: mean over the whole batch. None computes it from `weights` and `mask`, which must then
        be the **whole batch**: micro-batches that each divide by their own mean get different
        scales.

    Returns:
      One weight per token (gradient stopped); 0 where the mask is false, and unchanged weights if
      their mean is 0.

    Raises:
      ValueError: if `over` is unknown.

    References:
      verl, "Rollout correction", batch normalisation (off by default).
      https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html

    Examples:
      >>> weights, mask = jnp.array([[1.0, 2.0], [6.5, 9.0]]), jnp.array([[1, 1], [1, 0]])
      >>> normalized_weights(weights, mask, over="sequence").tolist()
      [[0.25, 0.5], [1.625, 0.0]]
    """
    settings.choice("over", over, WeightMean)
    mask, (weights,) = masked_constants(mask, weights=weights)
    rule = "is a mean of weights, which are not negative; None takes it here."
    mean = settings.optional("mean", mean, rule, at_least=0)
    if mean is None:
        counted, per = mask, weights
        if over == "sequence":
            counted = jnp.any(mask, axis=-1)
            per = jnp.sum(weights, axis=-1) / row_lengths(mask, weights)[..., 0]
        mean = divide(jnp.sum(per), num_true(counted))
    return divide(weights, jax.lax.stop_gradient(jnp.asarray(mean)))


def sequence_masked_weights(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    low: Number | None,
    high: Number | None,
    max_log_weight: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Token-level importance weights, untruncated, with sequences masked by their geometric mean.

        w_t where low <= exp(mean_t log w_t) <= high, and 0 on the other sequences

    "seq-mask-TIS" in OpenRLHF and NeMo-RL: sequences far from the trainer's policy get weight 0,
    and the token weights of the others are not truncated.

    Args:
      logprobs: as for `mismatch_weights`; no gradient.
      behaviour_logprobs: likewise.
      mask: true on sampled tokens. A row is one sequence.
      low: lower bound of the geometric mean, trainer over sampler; None disables it.
      high: upper bound of it; None disables it.
      max_log_weight: as for `mismatch_weights`.

    Returns:
      One weight per token (gradient stopped); 0 where the mask is false or in a masked sequence.

    Raises:
      ValueError: if the range is empty or negative.

    Examples:
      >>> log_weights, ones = jnp.log(jnp.array([[2.0, 8.0], [0.5, 4.0]])), jnp.ones((2, 2))
      >>> sequence_masked_weights(log_weights, 0 * ones, ones, low=0.5, high=2).round(3).tolist()
      [[0.0, 0.0], [0.5, 4.0]]
    """
    low, high = weight_range(low, high)
    arrays = (logprobs, behaviour_logprobs, mask)
    geometric = mismatch_weights(*arrays, level="geometric", max_log_weight=max_log_weight)
    weights = mismatch_weights(*arrays, max_log_weight=max_log_weight)
    return zero_masked(weights, as_mask(mask) & ~outside(geometric, low, high))


def log_ratio(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> tuple[Float[Array, "*batch time"], Bool[Array, "*batch time"]]:
    """``log w``, trainer over sampler, 0 where masked (gradient stopped); and the mask."""
    mask, (logprobs, behaviour_logprobs) = masked_constants(
        mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs
    )
    return logprobs - behaviour_logprobs, mask


def outside(
    x: Float[Array, "*shape"], low: settings.Checked | None, high: settings.Checked | None
) -> Bool[Array, "*shape"]:
    """Mask of the entries of `x` outside the range; false for NaN."""
    below = jnp.zeros_like(x, dtype=bool) if low is None else x < low
    return below if high is None else below | (x > high)


def weight_range(
    low: Number | None, high: Number | None
) -> tuple[settings.Checked | None, settings.Checked | None]:
    """The settings `low` and `high`, checked to be a non-empty range of weights."""
    rule = "bounds a weight and cannot be negative; None is off."
    low = settings.optional("low", low, rule, at_least=0)
    high = settings.optional("high", high, rule, at_least=0)
    if low is None or high is None:
        return low, high
    return settings.span(low, high, "no weight is in between.", equal=True)


def geometric_rejection_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    low: Number | None,
    high: Number | None,
) -> Bool[Array, "*batch time"]:
    """Geometric rejection mask: masks sequences whose geometric-mean weight is outside a range.

        a sequence is kept if low <= exp(mean_t log w_t) <= high,    w = trainer over sampler

    **The range bounds w.** verl bounds ``k1 = -log w`` instead, so its thresholds bound
    sampler over trainer: its (a, b) is ``low=1/b, high=1/a`` here. Its preset of 0.999 to 1.001 is
    the same in both directions, to a millionth.

    A loss that counts the tokens of its mask then has a smaller denominator.

    Args:
      logprobs: of the sampled tokens as computed by the trainer, in nats; no gradient.
      behaviour_logprobs: the same as recorded by the sampler; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      low: lower bound of the geometric mean; None disables it.
      high: upper bound of it; None disables it.

    Returns:
      A boolean mask, false wherever `mask` is.

    Raises:
      ValueError: if the range is empty or negative.

    References:
      verl, "Rollout correction", geometric rejection.
      https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html

    Examples:
      >>> log_weights = jnp.array([[0.1, 0.5], [0.1, -0.2]])
      >>> mask = jnp.array([[1, 1], [1, 1]])
      >>> geometric_rejection_mask(log_weights, 0 * log_weights, mask, low=0.8, high=1.25).tolist()
      [[False, False], [True, True]]
    """
    low, high = weight_range(low, high)
    geometric = mismatch_weights(
        logprobs, behaviour_logprobs, mask, level="geometric", max_log_weight=None
    )
    return as_mask(mask) & ~outside(geometric, low, high)


def divergence_rejection_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    kind: RejectionKind = "k3",
    over: RejectionOver = "mean",
    bound: Number,
    max_log_weight: Number | None = 20.0,
) -> Bool[Array, "*batch time"]:
    """Divergence rejection mask: masks tokens or sequences whose KL estimate exceeds a bound.

    With w = trainer over sampler, the divergence of a token is

    | kind | value | estimates |
    |---|---|---|
    | ``k2`` | ``log(w)^2 / 2`` | KL(sampler ‖ trainer), to second order |
    | ``k3`` | ``w - 1 - log w`` | KL(sampler ‖ trainer), unbiased and never negative |

    `over` is the level: ``token`` bounds each token and masks single tokens; ``sum``, ``mean`` and
    ``max`` bound that statistic of each sequence and mask whole sequences.

    Args:
      logprobs: of the sampled tokens as computed by the trainer, in nats; no gradient.
      behaviour_logprobs: the same as recorded by the sampler; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      kind: the estimator.
      over: the quantity to bound.
      bound: largest value that is not masked, in nats. For the mean of k3, verl has 0.001 to 0.01.
      max_log_weight: clamps ``log w`` to plus or minus this first, so that the divergence is finite
        if a token has probability 0 under one policy; None disables it.

    Returns:
      A boolean mask, false wherever `mask` is.

    Raises:
      ValueError: if `kind` or `over` is unknown or `bound` negative.

    References:
      As for `geometric_rejection_mask`.

    Examples:
      >>> log_weights = jnp.array([[0.1, 1.0], [0.1, -0.2]])
      >>> arrays = (log_weights, 0 * log_weights, jnp.ones((2, 2)))
      >>> divergence_rejection_mask(*arrays, over="mean", bound=0.1).tolist()
      [[False, False], [True, True]]
      >>> divergence_rejection_mask(*arrays, over="token", bound=0.1).tolist()
      [[True, False], [True, True]]
    """
    settings.choice("kind", kind, RejectionKind)
    settings.choice("over", over, RejectionOver, "a level of a divergence bound")
    bound = settings.number("bound", bound, "is a divergence and cannot be negative.", at_least=0)
    max_log_weight = settings.optional_distance("max_log_weight", max_log_weight)
    log_weights, mask = log_ratio(logprobs, behaviour_logprobs, mask)
    if max_log_weight is not None:
        log_weights = jnp.clip(log_weights, -max_log_weight, max_log_weight)
    # 0 where the mask is false, as the log-weights are.
    divergence = log_weights**2 / 2 if kind == "k2" else jnp.expm1(log_weights) - log_weights
    if over in ("sum", "mean"):
        divergence = jnp.sum(divergence, axis=-1, keepdims=True)
        if over == "mean":
            divergence = divergence / row_lengths(mask, divergence)
    elif over == "max":
        divergence = jnp.max(divergence, axis=-1, keepdims=True, initial=0)
    return mask & ~(divergence > bound)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EffectiveSampleSize(Additive, Generic[Leaf]):
    """Effective sample size as a fraction of the sample size, from sums over importance weights.

    Records of micro-batches add up, as `Mean` does; `value` is then the size of the whole batch.

    Attributes:
      count: number of weights.
      sum: their sum.
      sum_of_squares: sum of their squares.

    Examples:
      >>> record = EffectiveSampleSize.of(jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.ones(4))
      >>> float(record.value())
      0.5
    """

    count: Leaf
    sum: Leaf
    sum_of_squares: Leaf

    @classmethod
    def of(
        cls, weights: Float[ArrayLike, "*shape"], mask: Shaped[ArrayLike, "*shape"]
    ) -> "EffectiveSampleSize[Array]":
        """Sums over the weights where `mask` is true (gradient stopped)."""
        mask, (weights,) = masked_constants(mask, weights=weights)
        return EffectiveSampleSize(
            count=num_true(mask), sum=jnp.sum(weights), sum_of_squares=jnp.sum(weights**2)
        )

    def value(self) -> Float[Array, ""]:
        """``1 / mean((w / mean w)^2)``, in [0, 1]; 1 if all are equal, 0 if all are 0 or masked."""
        total, squares = jnp.asarray(self.sum), jnp.asarray(self.sum_of_squares)
        return divide(divide(total, squares) * total, jnp.asarray(self.count))


def mismatch_statistics(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    max_log_weight: Number | None = 20.0,
) -> dict[str, Mean | EffectiveSampleSize]:
    """Metrics of the mismatch between sampler and trainer: KL, perplexity, chi-square, weights.

    Args:
      logprobs: of the sampled tokens as computed by the trainer, in nats; no gradient.
      behaviour_logprobs: the same as recorded by the sampler; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      max_log_weight: clamps the log-weights of tokens and of sequences to plus or minus this in all
        metrics but ``kl``, ``log_ppl_diff`` and ``log_ppl_abs_diff``; None disables it.

    Returns:
      Records that add up over micro-batches (``+``) and devices (``jax.lax.psum``); `value` of each
      is, with w = trainer over sampler and names as in verl,

      * ``kl``: mean over tokens of ``-log w``, the k1 estimate of KL(sampler || trainer);
      * ``k3_kl``: mean over tokens of ``w - 1 - log w``, the k3 estimate of the same;
      * ``log_ppl_diff``: mean over sequences of their mean ``-log w``, the log-perplexity under the
        trainer minus that under the sampler;
      * ``log_ppl_abs_diff``: mean over sequences of the absolute value of that difference;
      * ``chi2_token``: mean over tokens of ``w^2 - 1``;
      * ``chi2_seq``: mean over sequences of ``(prod_t w)^2 - 1``;
      * ``weight``: mean over tokens of w, 1 in expectation;
      * ``eff_sample_size``: `EffectiveSampleSize` of the token weights, a fraction in [0, 1].

    References:
      verl, "Rollout correction", metrics.
      https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html

    Examples:
      >>> log_weights = jnp.array([[0.5, -0.25, 9.0]])
      >>> mask = jnp.array([[1, 1, 0]])
      >>> statistics = mismatch_statistics(log_weights, 0 * log_weights, mask)
      >>> float(statistics["kl"].value()), round(float(statistics["chi2_token"].value()), 4)
      (-0.125, 0.6624)
    """
    max_log_weight = settings.optional_distance("max_log_weight", max_log_weight)
    log_weights, mask = log_ratio(logprobs, behaviour_logprobs, mask)
    sequences = jnp.any(mask, axis=-1)
    total = jnp.sum(log_weights, axis=-1)
    gap = -total / row_lengths(mask, log_weights)[..., 0]
    kl = -log_weights
    if max_log_weight is not None:
        log_weights, total = (
            jnp.clip(x, -max_log_weight, max_log_weight) for x in (log_weights, total)
        )
    weights = jnp.exp(log_weights)
    return {
        "kl": Mean.of(kl, mask),
        "k3_kl": Mean.of(jnp.expm1(log_weights) - log_weights, mask),
        "log_ppl_diff": Mean.of(gap, sequences),
        "log_ppl_abs_diff": Mean.of(jnp.abs(gap), sequences),
        "chi2_token": Mean.of(jnp.expm1(2 * log_weights), mask),
        "chi2_seq": Mean.of(jnp.expm1(2 * total), sequences),
        "weight": Mean.of(weights, mask),
        "eff_sample_size": EffectiveSampleSize.of(weights, mask),
    }
