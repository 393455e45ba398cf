"""HAPO: DAPO with temperature, advantage and clip adapted to the policy's entropy at each token.

Four components, each with a switch, on top of DAPO; with all four off it is DAPO. They use the
log-entropy of a token, standardised over its batch and scaled to a signal from -1 to 1
(`jrl.losses.entropy_signal`):

| switch | component | what it does |
|---|---|---|
| `adaptive_temperature` | adaptive temperature sampling | samples hotter at high entropy |
| `token_level_group_average` | token-level group average | a group's mean is over its tokens |
| `differential_redistribution` | differential advantage redistribution | amplifies or damps |
| `asymmetric_clipping` | asymmetric adaptive clipping | widens one bound of the clip |

Statistics: the loss uses statistics of the whole mini-batch under the current policy, whatever the
micro-batch; the sampler uses the step before's, over all its tokens in the loss mask, under
the policy that sampled them. The trainer computes that policy's entropies before the first update,
in the pass that gives old log-probabilities, and keeps four numbers (`Recipe.update_state`).
The first step samples at the base temperature.

Importance weights: a token is sampled from a distribution b at its own temperature (after top-k and
top-p), while the loss is of the policy pi at the base temperature. The sampler records both
log-probabilities, `Batch.behaviour_logprobs` of b and `Batch.old_logprobs` of pi, and the loss of a
token is weighted by ``min(pi_old / b, 2)``, which together with its ratio ``pi / pi_old`` makes
``pi / b``. ``--mismatch None`` leaves the weights out, as the released code does, and
``--old-logprobs recompute`` takes pi_old from the trainer.

Differences between the paper, the released code and this implementation:

| | here | paper | code |
|---|---|---|---|
| signal at low entropy | negative | so its text, not its Eq. 6 | positive: no effect |
| `clip_high` | 0.28 | 0.28 | 0.2 |
| `tau`, with `temperature_signal` | 0.05, bounded | 0.1, standardized | 0.05, bounded |
| statistics in the loss | of a mini-batch | | of a micro-batch |
| weights for the temperature | on | | none |
| `clip_dual` | None | | 10 |
| `group_average_fallback` | None | | 5 |
| dynamic sampling | on | on | set by the scripts, never read |

References:
  "Heterogeneous Adaptive Policy Optimization", 2025. https://arxiv.org/abs/2509.16591
  https://github.com/starriver030515/HAPO
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from jrl.losses import (
    EntropyStatistics,
    entropy_signal,
    entropy_statistics,
    hapo_loss,
    token_level_group_average,
)
from jrl.recipes.base.batch import Batch, Targets, required
from jrl.recipes.base.mismatch import Denominator, Weighting
from jrl.recipes.base.recipe import Metrics
from jrl.recipes.base.temperature import AdaptiveTemperature, TemperatureSignal
from jrl.recipes.dapo import Dapo


@dataclass(frozen=True)
class Hapo(Dapo):
    """HAPO; DAPO's settings, the four components, sizes that fit a laptop."""

    adaptive_temperature: bool = True
    """Sample each token at a temperature that follows the policy's entropy, by the statistics of
    the step before."""
    token_level_group_average: bool = True
    """Compare a completion with the mean over the tokens of its group, not over its completions."""
    differential_redistribution: bool = True
    """Amplify the advantages of high-entropy tokens whose probability moves, and damp advantages of
    low-entropy tokens whose probability does not."""
    asymmetric_clipping: bool = True
    """Let high-entropy tokens rise further before the clip, and low-entropy ones fall further."""

    entropy_quantile: float = 0.8
    """Tokens above this quantile of the log-entropies count as high-entropy: rho in the paper."""
    tau: float = 0.05
    """How far the temperature follows the signal, as a share of itself: the released code's value,
    whose signal is bounded. The paper has 0.1 with a signal that is not."""
    temperature_signal: TemperatureSignal = "bounded"
    """What the temperature follows: a signal from -1 to 1 as in the released code ("bounded"), or
    the log-entropy in scales of its batch as in the paper ("standardized")."""
    redistribution_strength: float = 1.0
    """From 0, which is off, to 1, at which the token of least entropy has no advantage: adv_beta of
    the released code."""
    clip_strength: float = 1.0
    """At 1 a bound of the clip may double, 0 is off: clip_alpha of the released code."""
    group_average_fallback: float | None = None
    """A group with an advantage of this size or beyond gets DAPO's advantages, 5 in the released
    code; None is never."""

    mismatch: Weighting | None = "truncated"
    """Importance weights on the tokens' losses, of the policy over the sampling distribution at its
    own temperature: clamped to a range ("truncated"), 0 outside of it ("icepop"), or 0 on sequences
    whose mean is outside of it ("sequence-masked"); None is off."""

    def __post_init__(self):
        super().__post_init__()
        # Its constructor validates: it rejects settings under which a temperature could reach 0.
        AdaptiveTemperature(self.tau, self.entropy_quantile, self.temperature_signal)
        if not 0 <= self.redistribution_strength <= 1:
            raise ValueError(
                f"redistribution_strength={self.redistribution_strength} must be from 0, which is "
                "off, to 1: beyond that advantages would change their sign."
            )
        if self.clip_strength < 0:
            raise ValueError(f"clip_strength={self.clip_strength} cannot be negative; 0 is off.")
        if self.group_average_fallback is not None and self.group_average_fallback <= 0:
            raise ValueError(
                f"group_average_fallback={self.group_average_fallback} must be positive: the "
                "released code has 5, None is off."
            )

    @property
    def temperature_rule(self) -> AdaptiveTemperature | None:
        # Greedy decoding has no temperature to adapt.
        if not self.adaptive_temperature or self.temperature == 0:
            return None
        return AdaptiveTemperature(self.tau, self.entropy_quantile, self.temperature_signal)

    @property
    def default_denominator(self) -> Denominator:
        # At a constant temperature too: with old_logprobs="sampler", weights over the sampler's
        # whole policy would be rejected, as the ratio corrects for that already.
        return "drawn"

    @property
    def uses_statistics(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # The other two components read nothing of a mini-batch at its update.
        return self.differential_redistribution or self.asymmetric_clipping

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        if not self.token_level_group_average:
            return super().targets(batch)
        # So that the advantages of a group's tokens sum to 0: otherwise the token mean of the loss
        # would be biased towards the sign of the longer responses.
        return Targets(
            token_level_group_average(
                required(batch.rewards),
                required(batch.groups),
                batch.mask,
                fallback=self.group_average_fallback,
            )
        )

    def statistics(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
    ) -> EntropyStatistics[Array]:
        return entropy_statistics(entropy, batch.mask, quantile=self.entropy_quantile)

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        if not self.uses_statistics:
            return super().surrogate(logprobs, entropy, batch, statistics)
        # Advantage and bounds follow the entropy of the current policy, through which no gradient
        # flows.
        return hapo_loss(
            logprobs,
            required(batch.old_logprobs),
            required(batch.advantages),
            batch.mask,
            entropy_signal(entropy, batch.mask, statistics=required(statistics)),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            # A component that is off has strength 0: DAPO's bounds, DAPO's advantages.
            clip_strength=self.clip_strength if self.asymmetric_clipping else 0.0,
            redistribution=self.redistribution_strength
            if self.differential_redistribution
            else 0.0,
            clip_dual=self.clip_dual,
            aggregation=None,
        )

    @classmethod
    def paper(cls) -> "Hapo":
        """The paper's components and the released scripts' sizes (DAPO's table)."""
        return replace(
            super().paper(),
            learning_rate_warmup=10 * 16,  # 10 rollouts of 16 optimizer steps
            max_generation_rounds=16,
            # The paper's temperature; the released code's is the default.
            tau=0.1,
            temperature_signal="standardized",
        )
