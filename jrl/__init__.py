"""Reinforcement learning on token sequences: the functions one imports, on nothing but jax.

Examples:
  >>> from jrl import gae, ppo_loss, value_loss
"""

from jrl import losses
from jrl.losses import *  # noqa: F403 - one list of public names, kept there

__all__: list[str] = []
__all__ += losses.__all__
