"""Corrections of the mismatch between sampler and trainer: importance weights and rejection."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import (
    Mean,
    RejectionOver,
    WeightLevel,
    WeightMean,
    divergence_rejection_mask,
    geometric_rejection_mask,
    icepop_weights,
    mismatch_statistics,
    mismatch_weights,
    normalized_weights,
    sequence_masked_weights,
    truncated_weights,
)
from jrl.losses.mismatch import EffectiveSampleSize

OldLogprobs = Literal["sampler", "recompute"]
Denominator = Literal["policy", "drawn"]
Weighting = Literal["truncated", "icepop", "sequence-masked"]
Rejection = Literal["geometric", "k2", "k3"]

RANGES: dict[Weighting, tuple[float, float]] = {
    "truncated": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence-masked": (0.5, 5.0),
}
"""Default bounds of the weights: verl's for truncation, verl's and OpenRLHF's for the others."""
ACCEPTED: dict[Rejection, tuple[float, float]] = {
    "geometric": (0.999, 1.001),
    "k2": (0.0, 0.01),
    "k3": (0.0, 0.01),
}
"""Default range of accepted values: verl's, of the mean over a sequence."""


class Corrected(NamedTuple):
    """Result of a correction of a step's samples.

    Attributes:
      mask: ``[batch, time]`` sampled tokens that are not rejected.
      importance_weights: ``[batch, time]`` factors on the tokens' losses, None without.
      metrics: scalars under verl's names.
    """

    mask: Array
    importance_weights: Array | None
    metrics: dict[str, Array]


@dataclass(frozen=True)
class Correction:
    """Importance weights and a rejection mask, each off or on.

    All are computed from ``w``, the ratio of trainer to sampler (`jrl.losses.mismatch_weights`).
    First samples are rejected, then the weights of the others are normalised.

    Rejection and all metrics but `rollout_is_*` compare the sampled tokens' log-probabilities
    before top-k and top-p, at the base temperature. The weights have one of two denominators:

    | denominator | w | with the ratio of the loss |
    |---|---|---|
    | ``policy`` | trainer's policy / sampler's policy | current / sampler's policy |
    | ``drawn`` | `old_logprobs` / distribution sampled from | current / distribution sampled from |

    The second corrects for an adaptive temperature, at every temperature exactly, and for top-k and
    top-p as far as possible: tokens that they remove are never sampled. There `old_logprobs` may be
    the sampler's own, and no forward pass is needed.

    The fields are the hyperparameters of a recipe with these names. Weights come from
    `truncated_weights`, `icepop_weights` or `sequence_masked_weights`, rejection is by
    `geometric_rejection_mask` or `divergence_rejection_mask`; bounds that are None come from
    `RANGES` and `ACCEPTED`.
    """

    mismatch: Weighting | None = None
    mismatch_level: WeightLevel = "token"
    mismatch_denominator: Denominator | None = None
    mismatch_low: float | None = None
    mismatch_high: float | None = None
    mismatch_mean: WeightMean | None = None
    rejection: Rejection | None = None
    rejection_over: RejectionOver = "mean"
    rejection_low: float | None = None
    rejection_high: float | None = None

    @property
    def on(self) -> bool:
        """True if weights or rejection are on."""
        return self.mismatch is not None or self.rejection is not None

    @property
    def needs_recomputed_logprobs(self) -> bool:
        """True if the correction needs the policy's log-probabilities as recomputed by the
        trainer."""
        # With the denominator "drawn", weights use `old_logprobs`, which the sampler may provide.
        weighs = self.mismatch is not None and self.mismatch_denominator != "drawn"
        return weighs or self.rejection is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of weights, of geometric means if sequence-masked."""
        assert self.mismatch is not None
        return _filled((self.mismatch_low, self.mismatch_high), RANGES[self.mismatch])

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """The least and the greatest value that is not rejected."""
        assert self.rejection is not None
        return _filled((self.rejection_low, self.rejection_high), ACCEPTED[self.rejection])

    def correct(
        self,
        logprobs: Float[Array, "batch time"] | None,
        rollout_logprobs: Float[Array, "batch time"],
        mask: Bool[Array, "batch time"],
        *,
        old_logprobs: Float[Array, "batch time"] | None = None,
        behaviour_logprobs: Float[Array, "batch time"] | None = None,
    ) -> Corrected:
        """Computes the corrections of a whole step, before its first update.

        Args:
          logprobs: of the policy as recomputed by the trainer, in nats; None if it does not
            recompute them. Required if `needs_recomputed_logprobs`.
          rollout_logprobs: of the same policy as recorded by the sampler.
          mask: loss mask of the sampled tokens.
          old_logprobs: the denominators of the loss's ratio: `rollout_logprobs`, or `logprobs` if
            recomputed. Required, as the next, where the denominator of the weights is "drawn".
          behaviour_logprobs: in the distribution sampled from.
        """
        metrics, accepted = dict[str, Array](), mask
        if logprobs is not None:
            # Reported for every setting: they measure the drift of the sampler.
            arrays = (logprobs, rollout_logprobs, mask)
            statistics = mismatch_statistics(*arrays)
            # Statistics of the weights are reported from the corrected weights, see `_weights`.
            del statistics["weight"], statistics["eff_sample_size"]
            metrics = {f"rollout_corr/{name}": value.value() for name, value in statistics.items()}
            if self.rejection is not None:
                accepted = self._not_rejected(*arrays)
                metrics |= _rejection_metrics(mask, accepted)
        if self.mismatch is None:
            return Corrected(accepted, None, metrics)
        numerator, denominator = logprobs, rollout_logprobs
        # Times the loss's ratio, current / old, this is current / drawn: old_logprobs cancel.
        if self.mismatch_denominator == "drawn":
            numerator, denominator = old_logprobs, behaviour_logprobs
        assert numerator is not None and denominator is not None, "weights are a ratio of two"
        weights, of_weights = self._weights(numerator, denominator, mask, accepted)
        return Corrected(accepted, weights, metrics | of_weights)

    def _not_rejected(self, logprobs: Array, rollout_logprobs: Array, mask: Array) -> Array:
        arrays, (low, high) = (logprobs, rollout_logprobs, mask), self.rejection_bounds
        if self.rejection == "geometric":
            return geometric_rejection_mask(*arrays, low=low, high=high)
        assert self.rejection is not None
        over = self.rejection_over
        return divergence_rejection_mask(*arrays, kind=self.rejection, over=over, bound=high)

    def _weights(
        self, numerator: Array, denominator: Array, mask: Array, accepted: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Weights of the `accepted` tokens by a ratio of probabilities, of which numerator and
        denominator are the logarithms, and metrics of them."""
        arrays, (low, high) = (numerator, denominator, mask), self.bounds
        # "sequence-masked" bounds a sequence's geometric mean, though its weights are per token.
        level = "geometric" if self.mismatch == "sequence-masked" else self.mismatch_level
        bounded = mismatch_weights(*arrays, level=level)
        if self.mismatch == "sequence-masked":
            weights = sequence_masked_weights(*arrays, low=low, high=high)
        elif self.mismatch == "icepop":
            weights = icepop_weights(bounded, mask, low=low, high=high)
        else:
            weights = truncated_weights(bounded, mask, low=low, high=high)
        # Before the normalisation, which makes the mean 1 over the tokens that are trained on.
        weights = jnp.where(accepted, weights, 0.0)
        if self.mismatch_mean is not None:
            weights = normalized_weights(weights, accepted, over=self.mismatch_mean)
        some = jnp.any(accepted)
        # The fractions are of weights before clamping: how often a bound was exceeded.
        of_weights = {
            "mean": Mean.of(weights, accepted).value(),
            "min": jnp.where(some, jnp.min(weights, initial=jnp.inf, where=accepted), 0.0),
            "max": jnp.where(some, jnp.max(weights, initial=-jnp.inf, where=accepted), 0.0),
            "eff_sample_size": EffectiveSampleSize.of(weights, accepted).value(),
            "ratio_fraction_high": Mean.of(bounded > high, accepted).value(),
            "ratio_fraction_low": Mean.of(bounded < low, accepted).value(),
        }
        return weights, {f"rollout_corr/rollout_is_{n}": value for n, value in of_weights.items()}


def _filled(
    bounds: tuple[float | None, float | None], defaults: tuple[float, float]
) -> tuple[float, float]:
    low, high = bounds
    return defaults[0] if low is None else low, defaults[1] if high is None else high


def check_correction(correction: Correction, old_logprobs: OldLogprobs) -> None:
    """Raises ValueError for a setting that contradicts another, or these old log-probabilities, and
    for an empty range."""
    c = correction
    weighs, rejects = c.mismatch is not None, c.rejection is not None
    if weighs and c.mismatch_denominator != "drawn" and old_logprobs == "sampler":
        raise ValueError(
            f"mismatch={c.mismatch!r} needs old_logprobs='recompute': a ratio against the "
            "sampler corrects the mismatch already, and weights would correct it twice. Set that, "
            "divide by the sampling distribution (mismatch_denominator='drawn'), or use a "
            "rejection."
        )
    if not weighs:
        names = ("denominator", "level", "low", "high", "mean")
        _check_unset(c, [f"mismatch_{name}" for name in names], "mismatch=None")
    if c.mismatch == "sequence-masked" and c.mismatch_level != "token":
        raise ValueError(
            f"mismatch_level={c.mismatch_level!r} is not supported with "
            "mismatch='sequence-masked', whose weights are per token: leave it out."
        )
    if not rejects:
        names = ("over", "low", "high")
        _check_unset(c, [f"rejection_{name}" for name in names], "rejection=None")
    if c.rejection in ("k2", "k3"):
        reason = f"rejection={c.rejection!r} bounds a divergence from above"
        _check_unset(c, ["rejection_low"], reason)
    if c.rejection == "geometric" and c.rejection_over != "mean":
        raise ValueError(
            f"rejection_over={c.rejection_over!r} is not supported with rejection='geometric', "
            "which is a mean: choose k2 or k3, or leave it out."
        )
    if weighs:
        _check_range("mismatch", *c.bounds)
    if rejects:
        _check_range("rejection", *c.rejection_bounds)


def _check_unset(correction: Correction, names: list[str], reason: str) -> None:
    """Rejects settings that are not their defaults but would have no effect."""
    for name in names:
        setting = getattr(correction, name)
        if setting != getattr(Correction, name):
            raise ValueError(f"{name}={setting} has no effect: {reason}. Leave it out.")


def _check_range(owner: str, low: float, high: float) -> None:
    if low < 0 or high <= low:
        raise ValueError(f"{owner}_low={low} and {owner}_high={high} must satisfy 0 <= low < high.")


def _rejection_metrics(mask: Array, accepted: Array) -> dict[str, Array]:
    """Fraction of rejected tokens, and of sequences with a rejected token."""
    gone = mask & ~accepted
    sequences = jnp.any(mask, axis=1)
    return {
        "rollout_corr/rollout_rs_masked_fraction": Mean.of(gone, mask).value(),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean.of(
            jnp.any(gone, axis=1), sequences
        ).value(),
    }
