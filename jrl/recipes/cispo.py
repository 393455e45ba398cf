"""CISPO: the ratio is a clipped weight without a gradient, so that every token keeps its gradient.

References:
  MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025,
  eqs. 4 and 5. https://arxiv.org/abs/2506.13585
"""

from dataclasses import dataclass
from typing import Any

from jrl.losses import cispo_loss
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class Cispo(GroupRelative):
    """CISPO with an upper bound only, as in the paper; the value of the bound is verl's."""

    clip_low: float = 1.0
    """How far the weight may fall below 1; 1 is without a bound."""
    clip_high: float = 0.2
    """How far the weight may rise above 1."""

    policy_loss = staticmethod(cispo_loss)

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        # No `clip_dual`: the bound on the weight holds at advantages of either sign.
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}
