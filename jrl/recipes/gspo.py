"""GSPO: the probability ratio and its clip apply to the whole response.

References:
  Zheng et al., "Group Sequence Policy Optimization", 2025, eqs. 5 to 7 and section 5.1.
  https://arxiv.org/abs/2507.18071
"""

from dataclasses import dataclass

from jrl.losses import Aggregation, gspo_loss
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class Gspo(GroupRelative):
    """GSPO with the paper's bounds, which suit responses of thousands of tokens: the longer a
    response, the less the geometric mean of its tokens' ratios moves."""

    clip_low: float = 3e-4
    """How far the ratio of a response may fall below 1."""
    clip_high: float = 4e-4
    """How far it may rise above 1."""
    # The ratio is one number for a response, and so is its weight in the mean.
    aggregation: Aggregation = "seq-mean-token-mean"

    policy_loss = staticmethod(gspo_loss)
