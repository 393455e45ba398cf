"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called or the estimator's paper has it in its formula.
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
