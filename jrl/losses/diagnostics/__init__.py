"""Diagnostics of a critic and of its advantages, computed on one batch.

Two position papers of Shao and Cheng on the limits of VAPO name concerns about value-based
reinforcement learning of long reasoning, without experiments: https://arxiv.org/abs/2505.17997 (May
2025; *value approximation*, *adaptive lambda*, *token-level loss*, *exploration*, *generalisation*)
and https://arxiv.org/abs/2506.03038 (June 2025; *credit assignment* with a sparse reward,
*representation* of temporally abstract goals by a value, a global value signal as *local guidance*
of steps). Each diagnostic measures one or two of these concerns. Its docstring says which, and
how to read the numbers.

Arrays are ``[..., time]`` under the conventions of `jrl.losses`: positions and lengths count
the tokens in the mask, holes have no effect, entries outside the mask are never read, fully masked
rows are excluded, and results have no gradient. Results are arrays or named records
of arrays. They are statistics of the arrays passed and do not add up over micro-batches: pass the
whole batch. All functions trace under `jax.jit`.

Examples:
  >>> import jax.numpy as jnp
  >>> from jrl import diagnostics
  >>> diagnostics.length_share(jnp.ones((2, 3)).at[1, 1:].set(0), edges=(1,)).tokens.tolist()
  [0.25, 0.75]
"""

from jrl.losses.diagnostics import composition, credit, critic, lambdas
from jrl.losses.diagnostics.composition import *  # noqa: F403
from jrl.losses.diagnostics.credit import *  # noqa: F403
from jrl.losses.diagnostics.critic import *  # noqa: F403
from jrl.losses.diagnostics.lambdas import *  # noqa: F403

__all__: list[str] = []
__all__ += critic.__all__
__all__ += lambdas.__all__
__all__ += credit.__all__
__all__ += composition.__all__
