"""GSPO: the ratio, and so the clip, is of the whole response.

References:
  Zheng et al., "Group Sequence Policy Optimization", 2025, eqs. 5 to 7 and section 5.1.
  https://arxiv.org/abs/2507.18071
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from jrl.losses import Aggregation, gspo_loss
from jrl.recipes.base.batch import Batch, given
from jrl.recipes.base.group_relative import GroupRelative
from jrl.recipes.base.recipe import Metrics


@dataclass(frozen=True)
class Gspo(GroupRelative):
    """GSPO with the paper's bounds, which suit responses of thousands of tokens: the geometric mean
    of the tokens' ratios moves the less, the longer a response is."""

    clip_low: float = 3e-4
    """How far the ratio of a response may fall below 1."""
    clip_high: float = 4e-4
    """How far it may rise above 1."""
    # The ratio is one number for a response, and so is its weight in the mean.
    aggregation: Aggregation = "seq-mean-token-mean"

    def surrogate(
        self,
        logprobs: Float[Array, "batch time"],
        entropy: Float[Array, "batch time"],
        batch: Batch[Array],
        statistics: Any,
    ) -> tuple[Float[Array, "batch time"], Metrics]:
        return gspo_loss(
            logprobs,
            given(batch.old_logprobs),
            given(batch.advantages),
            batch.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_dual=self.clip_dual,
            aggregation=None,
        )
