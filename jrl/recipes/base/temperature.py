"""Adaptive sampling temperature that follows the entropy of the policy (HAPO)."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import (
    EntropyStatistics,
    Mean,
    adaptive_temperature,
    entropy_signal,
    entropy_statistics,
    standardized_entropy,
)
from jrl.recipes.base.batch import Batch, required

STATISTICS = "entropy_statistics"
"""Name of the entropy statistics of the step before in the state of an algorithm."""
TemperatureSignal = Literal["bounded", "standardized"]

LARGEST: dict[TemperatureSignal, float] = {"bounded": 1.0, "standardized": 5.0}
"""Bound to which a signal is clipped. The standardized entropy is unbounded, and a temperature must
stay above 0; a bound of 5 does not change the settings of the paper's tables."""


@dataclass(frozen=True)
class AdaptiveTemperature:
    """HAPO's temperature: hotter where the policy's entropy is above a quantile of the step before.

    With the entropy H of the policy before a token, at the base temperature, and the statistics of
    the step before,

        T = base (1 + tau clip(s, -L, L))

    where s is `jrl.losses.entropy_signal` and L is 1 ("bounded", the released code's form), or s is
    `jrl.losses.standardized_entropy` and L is 5 ("standardized", the paper's, which has no L).

    Args:
      tau: how much a signal of 1 adds, as a share of the base; 0 is a constant temperature.
      entropy_quantile: of the log-entropies, where the signal is 0.
      temperature_signal: which of the two.

    Raises:
      ValueError: if `temperature_signal` is unknown, `entropy_quantile` is not in [0, 1], or `tau`
        is negative or would allow a temperature of 0.

    References:
      "Heterogeneous adaptive policy optimization", 2025; adaptive temperature sampling.
      https://arxiv.org/abs/2509.16591
    """

    tau: float = 0.05
    entropy_quantile: float = 0.8
    temperature_signal: TemperatureSignal = "bounded"

    def __post_init__(self):
        signal = self.temperature_signal
        if signal not in get_args(TemperatureSignal):
            raise ValueError(f"temperature_signal={signal!r} is neither bounded nor standardized.")
        if not 0 <= self.entropy_quantile <= 1:
            raise ValueError(
                f"entropy_quantile={self.entropy_quantile} must be from 0 to 1, such as 0.8."
            )
        if not 0 <= self.tau * LARGEST[signal] < 1:
            raise ValueError(
                f"tau={self.tau} must be from 0, which is off, to below {1 / LARGEST[signal]:g} "
                f"with temperature_signal={signal!r}: from there on a temperature would reach 0."
            )

    def init_state(self) -> dict[str, Any]:
        """Neutral statistics: the first step samples at the base temperature."""
        return {STATISTICS: EntropyStatistics.neutral()}

    def sampler_state(self, state: dict[str, Any]) -> EntropyStatistics[Array]:
        """Statistics of the step before, for the sampler."""
        return state[STATISTICS]

    def update_state(
        self, state: dict[str, Any], batch: Batch[Array], base: float
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """State with the entropy statistics of this step for the sampler of the next one, and
        metrics of the temperatures of this step; see `Recipe.update_state`."""
        before, entropy, mask = state[STATISTICS], required(batch.old_entropy), batch.mask
        # The sampler's rule applied to the trainer's entropies: no temperatures need be recorded.
        temperatures = self.token_temperatures(entropy, mask, before, base)
        spread = {
            "mean": Mean.of(temperatures, mask).value(),
            "min": jnp.min(jnp.where(mask, temperatures, jnp.inf)),
            "max": jnp.max(jnp.where(mask, temperatures, -jnp.inf)),
        }
        # Without tokens there are no statistics, but the sampler needs some.
        any_token, fallback = jnp.any(mask), jnp.asarray(base, temperatures.dtype)
        latest = jax.tree.map(
            lambda new, old: jnp.where(any_token, new, old),
            entropy_statistics(entropy, mask, quantile=self.entropy_quantile),
            before,
        )
        return {**state, STATISTICS: latest}, {
            f"sampling/temperature/{name}": jnp.where(any_token, value, fallback)
            for name, value in spread.items()
        }

    def token_temperatures(
        self,
        entropy: Float[Array, "*shape"],
        mask: Bool[Array, "*shape"],
        statistics: EntropyStatistics[Array],
        base: float,
    ) -> Float[Array, "*shape"]:
        """Temperature of each token.

        Args:
          entropy: of the policy before it at temperature `base`, in nats.
          mask: true where the temperature adapts; elsewhere it is `base`.
          statistics: of the step before; the neutral ones give `base`.
          base: the temperature where the signal is 0.
        """
        bounded = self.temperature_signal == "bounded"
        # A token may be outside of the extremes in the statistics of the step before: hence a clip.
        signal = entropy_signal if bounded else standardized_entropy
        return adaptive_temperature(
            signal(entropy, mask, statistics=statistics),
            base=base,
            strength=self.tau,
            max_signal=LARGEST[self.temperature_signal],
        )
