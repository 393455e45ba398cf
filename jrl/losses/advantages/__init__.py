"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called.
"""

from jrl.losses.advantages.group_relative import grpo
from jrl.losses.advantages.temporal import gae, length_adaptive_lambda
from jrl.losses.advantages.whitening import whiten

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "length_adaptive_lambda",
    "grpo",
    "whiten",
]
