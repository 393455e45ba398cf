"""Corrections for a sampler whose probabilities are not quite the trainer's.

Everywhere ``w`` is trainer over sampler, and so are all thresholds. Nothing here has a gradient.
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
    """Importance weights of samples whose sampler is not quite the trainer's policy.

    With ``log w_t = logprobs - behaviour_logprobs``, trainer over sampler,

    | level | weight of each token | what it corrects |
    |---|---|---|
    | ``token`` | ``w_t`` | each token by itself: biased, little noise |
    | ``sequence`` | ``prod_t w_t``, on the whole row | the sequence: unbiased, very noisy |
    | ``geometric`` | ``exp(mean_t log w_t)``, likewise | nothing exactly; a length-free measure |

    A factor of 1.1 per token is 2.6 after 10 tokens and 14000 after 100.

    Which `logprobs`: those of the *old* policy, recomputed by the trainer before its first step,
    where the loss has a ratio of its own against them (three policies, "decoupled"); those of the
    current policy where it has not (two policies). Multiplying a PPO loss whose ratio is taken
    against the sampler by these weights would correct twice.

    Bound the weights by `truncated_weights` or `icepop_weights` and give them to a loss as
    `importance_weights`.

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them, at its temperature; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      level: over what the ratio is taken.
      max_log_weight: the logarithm of a weight is clamped to plus or minus this; None is off.

    Returns:
      One weight per token, without a gradient; 0 where the mask is false.

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
    """Weights clamped to a range: truncated importance sampling (TIS).

        min(w, high), and max(., low) if it is set

    On weights of tokens this is token TIS, on those of sequences sequence TIS. verl's default is 2
    (1.5 to 5 are common for tokens, 2 to 10 for sequences); OpenRLHF clamps to [0.5, 5].

    Args:
      weights: trainer over sampler, of `mismatch_weights`; no gradient.
      mask: true on sampled tokens.
      high: the greatest weight; None is off.
      low: the least; None is off.

    Returns:
      One weight per token, without a gradient; 0 where the mask is false.

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
    """Weights set to 0 outside of a range: masked importance sampling (MIS), as in IcePop.

        w where low <= w <= high, and 0 elsewhere

    On weights of tokens this is IcePop or token MIS; on those of sequences it is sequence MIS,
    TRL's default with `high` 3 and no `low`. A token of weight 0 gives no gradient but is still
    counted by the loss's denominators: a rejection mask changes those, too.

    The range is one of trainer over sampler. verl's thresholds for rejection by k1 act on
    ``-log w``, so that its "0.5_2.0" bounds sampler over trainer, in logarithms.

    Args:
      weights: trainer over sampler, of `mismatch_weights`; no gradient.
      mask: true on sampled tokens.
      low: the least weight that is kept; None is off. 0.5 in verl's preset and OpenRLHF.
      high: the greatest; None is off. 5 in both.

    Returns:
      One weight per token, without a gradient; 0 where the mask is false.

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
    """Weights divided by their mean over the batch, so that they average to one.

    Truncation makes weights smaller on average, and with them the step; this undoes it.

    | over | the mean |
    |---|---|
    | ``token`` | of the weights of all true tokens |
    | ``sequence`` | over the sequences, of the mean weight within each |

    Args:
      weights: after truncation; no gradient.
      mask: true on sampled tokens.
      over: what each counts once in the mean.
      mean: the mean over the whole batch. None takes it from the arrays given here, which must then
        be the **whole batch**: micro-batches that each divide by their own mean are weighed
        differently.

    Returns:
      One weight per token, without a gradient; 0 where the mask is false, and the weights as they
      are if their mean is 0.

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
    """Weights of tokens, unclamped, of the sequences whose geometric mean lies in a range.

        w_t where low <= exp(mean_t log w_t) <= high, and 0 on the other sequences

    "seq-mask-TIS" in OpenRLHF and NeMo-RL: a sequence that as a whole is far from the trainer's
    policy is left out, and within the others nothing is truncated.

    Args:
      logprobs: as for `mismatch_weights`; no gradient.
      behaviour_logprobs: likewise.
      mask: true on sampled tokens. A row is one sequence.
      low: the least geometric mean that is kept, trainer over sampler; None is off.
      high: the greatest; None is off.
      max_log_weight: as for `mismatch_weights`.

    Returns:
      One weight per token, without a gradient; 0 where the mask is false or the sequence left out.

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
    """``log w``, trainer over sampler, without a gradient and 0 under the mask; and the mask."""
    mask, (logprobs, behaviour_logprobs) = masked_constants(
        mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs
    )
    return logprobs - behaviour_logprobs, mask


def outside(
    x: Float[Array, "*shape"], low: settings.Checked | None, high: settings.Checked | None
) -> Bool[Array, "*shape"]:
    """Mask of the entries of `x` outside of the range; false for NaN."""
    below = jnp.zeros_like(x, dtype=bool) if low is None else x < low
    return below if high is None else below | (x > high)


def weight_range(
    low: Number | None, high: Number | None
) -> tuple[settings.Checked | None, settings.Checked | None]:
    """The settings `low` and `high` of a range of weights that holds something."""
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
    """The mask without the sequences whose weight per token leaves a range.

        a sequence stays if low <= exp(mean_t log w_t) <= high,    w = trainer over sampler

    **The range is one of w.** verl computes the same with ``k1 = -log w`` and bounds that, so its
    thresholds are those of sampler over trainer: its (a, b) is ``low=1/b, high=1/a`` here. Its
    preset of 0.999 to 1.001 is, to a millionth, the same both ways.

    With fewer true tokens, a loss that counts its own tokens has another denominator.

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      low: the least geometric mean that is kept; None is off.
      high: the greatest; None is off.

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
    """The mask without the tokens or sequences whose divergence exceeds a bound.

    With w = trainer over sampler, the divergence of a token is

    | kind | value | estimates |
    |---|---|---|
    | ``k2`` | ``log(w)^2 / 2`` | KL(sampler ‖ trainer), to second order |
    | ``k3`` | ``w - 1 - log w`` | KL(sampler ‖ trainer), without bias and never negative |

    and what is compared with the bound is, with `over`, the value of each ``token`` (which then
    goes alone) or the ``sum``, ``mean`` or ``max`` over each sequence (which goes as a whole).

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      kind: the estimator.
      over: what is bounded.
      bound: the greatest value that is kept, in nats. For the mean of k3, verl has 0.001 to 0.01.
      max_log_weight: ``log w`` is clamped to plus or minus this first, so that probabilities that
        vanish under one policy are far, and not undefined; None is off.

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
    """The sums behind the share of a sample that counts, which itself is not additive.

    Records of pieces add up as `Mean` does, and `value` is then that of everything together.

    Attributes:
      count: how many weights.
      sum: their sum.
      sum_of_squares: the sum of their squares.

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
        """The sums over the weights where `mask` is true, without a gradient."""
        mask, (weights,) = masked_constants(mask, weights=weights)
        return EffectiveSampleSize(
            count=num_true(mask), sum=jnp.sum(weights), sum_of_squares=jnp.sum(weights**2)
        )

    def value(self) -> Float[Array, ""]:
        """``1 / mean((w / mean w)^2)``, from 0 to 1; 1 if all weights agree, 0 if none counts."""
        total, squares = jnp.asarray(self.sum), jnp.asarray(self.sum_of_squares)
        return divide(divide(total, squares) * total, jnp.asarray(self.count))


def mismatch_statistics(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    max_log_weight: Number | None = 20.0,
) -> dict[str, Mean | EffectiveSampleSize]:
    """How far the sampler of a batch is from the policy that the trainer computes.

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      max_log_weight: log-weights, of tokens and of sequences, are clamped to plus or minus this
        in everything but ``kl`` and ``log_ppl_diff``; None is off.

    Returns:
      Records that add up over micro-batches (``+``) and devices (``jax.lax.psum``); `value` of each
      is, with w = trainer over sampler and names as in verl,

      * ``kl``: mean over tokens of ``-log w``, the k1 estimate of KL(sampler || trainer);
      * ``k3_kl``: mean over tokens of ``w - 1 - log w``, the k3 estimate of the same;
      * ``log_ppl_diff``: mean over sequences of their mean ``-log w``, that is of the
        log-perplexity under the trainer minus that under the sampler;
      * ``log_ppl_abs_diff``: the same of its size;
      * ``chi2_token``: mean over tokens of ``w^2 - 1``;
      * ``chi2_seq``: mean over sequences of ``(prod_t w)^2 - 1``;
      * ``weight``: mean over tokens of w, 1 in expectation;
      * ``eff_sample_size``: `EffectiveSampleSize` of the tokens' weights, a share from 0 to 1.

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
