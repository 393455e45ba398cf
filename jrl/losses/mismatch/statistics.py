"""Statistics of the mismatch between sampler and trainer, as means that add up."""

import operator
from dataclasses import dataclass
from typing import Generic

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, as_mask, check_shapes, zero_masked
from jrl.losses.mismatch.weights import lengths, log_ratio
from jrl.losses.reduction import Leaf, Mean, divide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EffectiveSampleSize(Generic[Leaf]):
    """The sums behind the share of a sample that counts, which itself is not additive.

    Two of them add with ``+``, over devices ``jax.lax.psum`` takes the record as it is, and `value`
    is then that of everything together.

    Attributes:
      count: how many weights.
      sum: their sum.
      sum_of_squares: the sum of their squares.

    Examples:
      >>> import jax.numpy as jnp
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
        check_shapes(weights=weights, mask=mask)
        mask = as_mask(mask)
        (weights,) = as_floats(jax.lax.stop_gradient(jnp.asarray(weights)))
        weights = zero_masked(weights, mask)
        return EffectiveSampleSize(
            count=jnp.sum(mask, dtype=jnp.int32),
            sum=jnp.sum(weights),
            sum_of_squares=jnp.sum(weights**2),
        )

    def __add__(self, other: "EffectiveSampleSize[Leaf]") -> "EffectiveSampleSize[Leaf]":
        return jax.tree.map(operator.add, self, other)

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
      >>> import jax.numpy as jnp
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
    gap = -total / lengths(mask, log_weights)[..., 0]
    clamped = total
    kl = -log_weights
    if max_log_weight is not None:
        log_weights = jnp.clip(log_weights, -max_log_weight, max_log_weight)
        clamped = jnp.clip(total, -max_log_weight, max_log_weight)
    weights = jnp.exp(log_weights)
    return {
        "kl": Mean.of(kl, mask),
        "k3_kl": Mean.of(jnp.expm1(log_weights) - log_weights, mask),
        "log_ppl_diff": Mean.of(gap, sequences),
        "log_ppl_abs_diff": Mean.of(jnp.abs(gap), sequences),
        "chi2_token": Mean.of(jnp.expm1(2 * log_weights), mask),
        "chi2_seq": Mean.of(jnp.expm1(2 * clamped), sequences),
        "weight": Mean.of(weights, mask),
        "eff_sample_size": EffectiveSampleSize.of(weights, mask),
    }
