"""Diagnostics of a critic on one rollout: the functions of `jrl.losses`, as one report."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import diagnostics, explained_variance, gae
from sharding.sharded_jit import DeviceJit

BINS = 10
"""Number of bins of the position in a response, and of predicted probabilities."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "rewards", "mask", "correct", "groups", "lam", "gamma"],
    meta_fields=["low", "high", "alpha"],
)
@dataclass(frozen=True)
class CriticRollout:
    """A rollout with the critic's values, on the host.

    Attributes:
      values: ``[batch, time]`` values of the critic.
      rewards: ``[batch, time]`` usually zero except on the last sampled token, or for a
        conversation on the last token of each turn.
      mask: ``[batch, time]`` sampled tokens.
      correct: ``[batch]`` true for full marks.
      groups: ``[batch]`` completions of one prompt share a number.
      lam: GAE lambda of the policy's advantages; a number, or ``[batch, 1]``.
      gamma: the discount per token.
      low: the return of a failure.
      high: the return of a success.
      alpha: of the length-adaptive lambda; None if lam does not adapt.
    """

    values: np.ndarray | Array
    rewards: np.ndarray | Array
    mask: np.ndarray | Array
    correct: np.ndarray | Array
    groups: np.ndarray | Array
    lam: float | np.ndarray | Array
    gamma: float | Array = 1.0
    low: float | Array = 0.0
    high: float | Array = 1.0
    alpha: float | Array | None = None

    @functools.cached_property
    def lengths(self) -> np.ndarray | Array:
        """``[batch]`` sampled tokens of each completion."""
        return self.mask.sum(axis=1).astype(np.int32)

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """Boundaries that divide the responses by length into up to four buckets of similar
        size."""
        lengths = self.lengths[self.lengths > 0]
        if not lengths.size:
            return ()
        quartiles = {int(x) for x in np.quantile(lengths, (0.25, 0.5, 0.75), method="nearest")}
        return tuple(sorted(quartile for quartile in quartiles if quartile < lengths.max()))


@dataclass(frozen=True)
class CriticReport:
    """All diagnostics of one rollout. Per-position fields have `BINS` entries.

    Attributes:
      position: explained variance, bias and error by position in the response.
      explained_variance: over all tokens.
      calibration: of values as probabilities of success.
      bootstrap: size of the bias in the advantages, from single returns: an upper estimate.
      bias: ``[bins]`` size of the mean bias in the advantages, in which the noise of returns
        averages out.
      deviation: standard deviation of the advantages.
      reach: distance over which the terminal reward affects advantages.
      guard_rate: share of responses too short for an adaptive lambda; None if lam does not adapt.
      sensitivity: per bucket of length, advantages at lam against those at 1.
      variance: of the advantages, within and between responses.
      concentration: of the temporal-difference errors.
      errors: ``[bins]`` mean size of the temporal-difference errors.
      contradiction: share of tokens whose advantage contradicts the outcome.
      contradictions: ``[bins]`` the same by position in the response.
      length: shares of the buckets of length.
      negative: share of responses with a negative mean advantage.
      groups: shares of groups all right and all wrong, pass@1 and pass@k.
    """

    position: diagnostics.ByPosition
    explained_variance: float
    calibration: diagnostics.Calibration
    bootstrap: diagnostics.BootstrapBias
    bias: np.ndarray
    deviation: float
    reach: diagnostics.TerminalReach
    guard_rate: float | None
    sensitivity: diagnostics.LambdaSensitivity
    variance: diagnostics.VarianceSplit
    concentration: diagnostics.Concentration
    errors: np.ndarray
    contradiction: float
    contradictions: np.ndarray
    length: diagnostics.LengthShare
    negative: diagnostics.NegativeShare
    groups: diagnostics.GroupDegeneracy

    def summary(self) -> dict[str, float]:
        """One or two numbers per diagnostic, by name; infinite ones are left out."""
        sensitivity = self.sensitivity
        statistics = {
            "explained_variance": self.explained_variance,
            "explained_variance/first_decile": self.position.explained_variance[0],
            "explained_variance/last_decile": self.position.explained_variance[-1],
            "bias/first_decile": self.position.bias[0],
            "bias/last_decile": self.position.bias[-1],
            "calibration/brier": self.calibration.brier,
            "calibration/ece": self.calibration.ece,
            "bootstrap_bias/mean": np.mean(self.bias),
            "bootstrap_bias/upper_estimate": self.bootstrap.bias,
            "bootstrap_bias/bound": self.bootstrap.bound,
            "advantage/std": self.deviation,
            "terminal_reach/share": self.reach.share,
            "terminal_reach/horizon": self.reach.horizon,
            "lambda/correlation": np.average(sensitivity.correlation, weights=sensitivity.tokens),
            "lambda/sign_agreement": np.average(
                sensitivity.sign_agreement, weights=sensitivity.tokens
            ),
            "variance/within_over_between": self.variance.ratio,
            "td/gini": self.concentration.gini,
            "td/top_5_percent_mass": self.concentration.top_mass,
            "td/identity_gap": self.concentration.identity_gap,
            "outcome_contradiction": self.contradiction,
            "negative/responses": self.negative.responses,
            "negative/tokens": self.negative.tokens,
            "advantage/drift": self.negative.drift,
            "groups/all_right": self.groups.all_right,
            "groups/all_wrong": self.groups.all_wrong,
            "groups/pass_at_k_gap": self.groups.gap,
        }
        if self.guard_rate is not None:
            statistics["lambda/guard_rate"] = self.guard_rate
        return {name: float(x) for name, x in statistics.items() if np.isfinite(x)}


def critic_diagnostics(rollout: CriticRollout) -> CriticReport:
    """All diagnostics of one rollout.

    Raises:
      ValueError: if it has no token.
    """
    if not rollout.mask.any():
        raise ValueError("the rollout has no sampled token, so there is nothing to diagnose.")
    arrays = replace(rollout, lam=np.asarray(rollout.lam, rollout.values.dtype))
    per_token, scalars, records = _compute_diagnostics(arrays, edges=rollout.edges)
    advantages, bias, steps, bins = map(np.asarray, per_token)

    def bin_means(x: np.ndarray) -> np.ndarray:
        """Mean over the tokens in each bin of the position in a response."""
        mask = rollout.mask
        total = np.bincount(bins[mask], x[mask], BINS)
        return total / np.maximum(np.bincount(bins[mask], minlength=BINS), 1)

    position = np.cumsum(rollout.mask, axis=1)
    first = rollout.mask & (position == 1)
    discounts = rollout.gamma ** (position - 1.0)
    predicted = np.where(first, rollout.values, 0).sum(1)
    surprise = np.where(rollout.mask, rollout.rewards * discounts, 0).sum(1) - predicted
    contradicts = np.sign(advantages) != np.sign(surprise)[:, None]
    fields = records | {name: None if x is None else float(x) for name, x in scalars.items()}
    return CriticReport(
        **fields,
        bias=np.abs(bin_means(bias)),
        deviation=float(np.std(advantages[rollout.mask])),
        errors=bin_means(np.abs(steps)),
        contradictions=bin_means(contradicts.astype(advantages.dtype)),
    )


@functools.partial(DeviceJit, static_argnames="edges")
def _compute_diagnostics(
    rollout: CriticRollout, *, edges: tuple[int, ...]
) -> tuple[tuple[Array, ...], dict[str, Any], dict[str, Any]]:
    """Computes the arrays of the report in one compiled function: per token, scalars, records."""
    values, rewards, mask = map(jnp.asarray, (rollout.values, rollout.rewards, rollout.mask))
    lam, gamma, alpha, lengths = rollout.lam, rollout.gamma, rollout.alpha, rollout.lengths
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
    _, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    errors, solved = values - returns, rollout.correct.astype(values.dtype)
    per_token = (
        advantages,
        diagnostics.bootstrap_bias(errors, mask, lam, gamma=gamma),
        gae(rewards, values, mask, gamma=gamma, lam=0.0)[0],
        diagnostics.relative_position(mask, num_bins=BINS),
    )
    scalars = {
        "explained_variance": explained_variance(values, returns, mask),
        "guard_rate": None if alpha is None else diagnostics.guard_rate(lengths, alpha=alpha),
        "contradiction": diagnostics.outcome_contradiction(
            rewards, values, advantages, mask, gamma=gamma
        ),
    }
    records = {
        "position": diagnostics.by_position(values, returns, mask, num_bins=BINS),
        "calibration": diagnostics.calibration(
            values, solved[:, None], mask, low=rollout.low, high=rollout.high, num_bins=BINS
        ),
        "bootstrap": diagnostics.bootstrap_bias_bound(errors, advantages, mask, lam, gamma=gamma),
        "reach": diagnostics.terminal_reach(mask, lam=lam, gamma=gamma),
        "sensitivity": diagnostics.lambda_sensitivity(
            rewards, values, mask, lam=lam, gamma=gamma, edges=edges
        ),
        "variance": diagnostics.within_between_variance(advantages, mask),
        "concentration": diagnostics.td_concentration(rewards, values, mask, gamma=gamma),
        "length": diagnostics.length_share(mask, edges=edges),
        "negative": diagnostics.negative_share(advantages, mask),
        "groups": diagnostics.group_degeneracy(solved, rollout.groups),
    }
    return per_token, scalars, records
