"""Policy losses: a loss per token, then one reduction.

Arguments come *current policy first, then old*; verl and its descendants use the reverse order.
Only the current log-probabilities carry a gradient.
"""

from jrl.losses.policy import (
    covariance,
    hapo,
    hapo_signal,
    reinforce,
    selection,
    sequence_ratio,
    token_ratio,
)
from jrl.losses.policy.covariance import *  # noqa: F403
from jrl.losses.policy.hapo import *  # noqa: F403
from jrl.losses.policy.hapo_signal import *  # noqa: F403
from jrl.losses.policy.reinforce import *  # noqa: F403
from jrl.losses.policy.selection import *  # noqa: F403
from jrl.losses.policy.sequence_ratio import *  # noqa: F403
from jrl.losses.policy.token_ratio import *  # noqa: F403

__all__: list[str] = []
__all__ += token_ratio.__all__
__all__ += sequence_ratio.__all__
__all__ += reinforce.__all__
__all__ += hapo_signal.__all__
__all__ += hapo.__all__
__all__ += covariance.__all__
__all__ += selection.__all__
