"""Advantage estimators: from a critic (GAE), from groups (GRPO, RLOO, ...), and from returns.

Advantages have no gradient. They are whitened only by a call of `whiten`, or where the paper's
formula includes whitening.
"""

from jrl.losses.advantages import best_of_k, critic, group, rewards_to_go, whitening
from jrl.losses.advantages.best_of_k import *  # noqa: F403
from jrl.losses.advantages.critic import *  # noqa: F403
from jrl.losses.advantages.group import *  # noqa: F403
from jrl.losses.advantages.rewards_to_go import *  # noqa: F403
from jrl.losses.advantages.whitening import *  # noqa: F403

__all__: list[str] = []
__all__ += critic.__all__
__all__ += group.__all__
__all__ += best_of_k.__all__
__all__ += rewards_to_go.__all__
__all__ += whitening.__all__
