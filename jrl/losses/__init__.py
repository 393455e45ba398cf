"""Losses, advantages and metrics as functions of arrays. They depend on jax alone.

Arrays are `[..., time]`, aligned to the token that they describe. ``logprobs[b, t]`` is the
log-probability of ``tokens[b, t]`` given the tokens before it, in nats. ``values[b, t]`` is the
critic's estimate of the state before that token. ``mask[b, t]`` is true where the policy sampled
it. A mask may be bool or 0/1 of any dtype and may have holes; masked values, NaN and inf included,
never reach a result or a gradient. Half-precision inputs are computed in float32.

`None` means "off" and 0 means zero. Arrays come first, the current policy before the old one. If
their shapes do not agree, a ValueError names them.

Examples in docstrings assume ``import jax.numpy as jnp`` and the names of `jrl`.
"""

from jrl.losses import advantages, diagnostics, distillation, logits, mismatch, policy
from jrl.losses.advantages import *  # noqa: F403 - one list of names for each family, kept there
from jrl.losses.coefficients import adaptive_entropy_coefficient, adaptive_kl_coefficient
from jrl.losses.conventions import Library, conventions
from jrl.losses.distillation import *  # noqa: F403
from jrl.losses.divergence import KLEstimator, kl_estimate
from jrl.losses.logits import *  # noqa: F403
from jrl.losses.mismatch import *  # noqa: F403
from jrl.losses.policy import *  # noqa: F403
from jrl.losses.reduction import Aggregation, Denominators, EmptyRows, Mean, aggregate, masked_mean
from jrl.losses.rewards import informative_groups, overlong_filter, overlong_penalty, pass_at_k
from jrl.losses.value import ExplainedVariance, bounded_value, explained_variance, value_loss

__all__: list[str] = []
__all__ += advantages.__all__
__all__ += policy.__all__
__all__ += ["ExplainedVariance", "bounded_value", "explained_variance", "value_loss"]
__all__ += ["KLEstimator", "kl_estimate"]
__all__ += logits.__all__
__all__ += distillation.__all__
__all__ += ["adaptive_entropy_coefficient", "adaptive_kl_coefficient"]
__all__ += ["informative_groups", "overlong_filter", "overlong_penalty"]
__all__ += mismatch.__all__
__all__ += ["Aggregation", "Denominators", "EmptyRows", "Mean", "aggregate", "masked_mean"]
__all__ += ["Library", "conventions", "diagnostics", "pass_at_k"]
