"""Distillation: advantages and divergences that move a policy towards a teacher.

The divergence over the whole vocabulary is `jsd_from_logits`.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    as_floats,
    check_shapes,
    clip,
    masked_constants,
    zero_masked,
)
from jrl.losses.logits import jsd_from_logits
from jrl.losses.vocabulary import rows_of_logits

__all__ = [
    "distillation_advantages",
    "extrapolated_distillation_advantages",
    "top_k_divergence",
]

# The least probability of all other tokens: an ulp of the sum in float32.
LEAST_REST = 1e-7


def distillation_advantages(
    logprobs: Float[ArrayLike, "*batch time"],
    teacher_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    coefficient: Number = 1.0,
    kl: Float[ArrayLike, "*batch time"] | None = None,
    max_log_ratio: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Advantages of on-policy distillation: the teacher's log-probability minus the policy's.

    With ``d = logprobs - teacher_logprobs`` on tokens sampled from the policy:

    | baseline | advantage |
    |---|---|
    | ``kl=None`` | ``-coefficient d`` |
    | `kl` given | ``-coefficient (d - kl)`` |

    ``d`` is one sample of the reverse KL divergence of its position, so REINFORCE with these
    advantages descends the divergences of all positions, each for its own prefix. The closed-form
    divergence has the mean of ``d``: subtracting it changes no expectation and removes variance.

    Use them alone, or add them to the advantages of a reward.

    Args:
      logprobs: of the sampled tokens under the policy, in nats; no gradient.
      teacher_logprobs: the same under the teacher; no gradient.
      mask: true on sampled tokens.
      coefficient: weight, 0 or more. 0 gives advantages of 0.
      kl: the baseline, KL(policy || teacher) of each token's distributions in closed form, such as
        `kl_from_logits` gives; no gradient. None subtracts nothing.
      max_log_ratio: clamps d to plus or minus this many nats, so that a token which the teacher
        never writes has a finite advantage; None disables it.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    Raises:
      ValueError: if a setting is negative.

    References:
      Thinking Machines, "On-policy distillation", 2025.
      https://thinkingmachines.ai/blog/on-policy-distillation
      "vOPD", 2026 (the baseline). https://arxiv.org/abs/2605.07865

    Examples:
      >>> logprobs, teacher = jnp.array([-1.0, -2.0, 0.0]), jnp.array([-3.0, -1.5, jnp.nan])
      >>> mask = jnp.array([1, 1, 0])
      >>> distillation_advantages(logprobs, teacher, mask).tolist()
      [-2.0, 0.5, 0.0]
      >>> distillation_advantages(logprobs, teacher, mask, kl=jnp.full(3, 0.25)).tolist()
      [-1.75, 0.75, 0.0]
    """
    rule = "is a weight and cannot be negative; 0 is off."
    coefficient = settings.number("coefficient", coefficient, rule, at_least=0)
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    arrays = {"logprobs": logprobs, "teacher_logprobs": teacher_logprobs}
    if kl is not None:
        arrays["kl"] = kl
    _, (policy, teacher, *baseline) = masked_constants(mask, **arrays)
    gap = _bounded(teacher - policy, max_log_ratio)
    return coefficient * (gap + baseline[0] if baseline else gap)


def extrapolated_distillation_advantages(
    logprobs: Float[ArrayLike, "*batch time"],
    teacher_logprobs: Float[ArrayLike, "*batch time"],
    reference_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    scale: Number = 1.25,
    max_log_ratio: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Advantages of distillation beyond the teacher, along its change from a reference (ExOPD).

        A_t = scale (log pi_T(y_t) - log pi_ref(y_t)) - (log pi(y_t) - log pi_ref(y_t))

    The first term is the reward that the teacher's training implies, the second the KL penalty. A
    `scale` of 1 gives `distillation_advantages`, below 1 a policy between reference and teacher,
    and above 1 a policy beyond the teacher.

    Args:
      logprobs: of the sampled tokens under the policy, in nats; no gradient.
      teacher_logprobs: the same under the teacher; no gradient.
      reference_logprobs: the same under the reference, which the teacher was trained from (or the
        policy); no gradient.
      mask: true on sampled tokens.
      scale: scale of the implied reward, 0 or more.
      max_log_ratio: clamps both log-ratios to plus or minus this many nats; None disables it.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    Raises:
      ValueError: if a setting is negative.

    References:
      "Learning beyond teacher", 2026. https://arxiv.org/abs/2602.12125

    Examples:
      >>> logprobs, teacher, reference = jnp.array([-2.0]), jnp.array([-1.0]), jnp.array([-3.0])
      >>> arrays = logprobs, teacher, reference, jnp.ones(1)
      >>> extrapolated_distillation_advantages(*arrays, scale=1.5).tolist()
      [2.0]
    """
    rule = "scales a reward and cannot be negative; 1 imitates the teacher."
    scale = settings.number("scale", scale, rule, at_least=0)
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    _, (policy, teacher, reference) = masked_constants(
        mask,
        logprobs=logprobs,
        teacher_logprobs=teacher_logprobs,
        reference_logprobs=reference_logprobs,
    )
    change = _bounded(teacher - reference, max_log_ratio)
    return scale * change - _bounded(policy - reference, max_log_ratio)


def _bounded(log_ratio: Float[Array, "*shape"], bound: settings.Checked | None) -> Array:
    return log_ratio if bound is None else clip(log_ratio, bound)


def top_k_divergence(
    top_logprobs: Float[ArrayLike, "*batch k"],
    teacher_top_logprobs: Float[ArrayLike, "*batch k"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    beta: Number = 1.0,
) -> Float[Array, "*batch"]:
    """Divergence of a policy and its teacher on the teacher's top k tokens and the rest.

    `jsd_from_logits` of k + 1 events: the teacher's top k tokens, and one more for all other
    tokens, of the remaining probability. For a teacher that answers with its top k, as servers do.
    At most the divergence over the whole vocabulary.

    The gradient of the reverse KL, by the policy's log-probabilities, holds the weights p and the
    log-ratios constant:

        sum_j stop(p_j log p_j/q_j) grad log p_j        over the k tokens and the rest

    The gradient of the sum over the k tokens alone has ``sum_j grad p_j`` besides, which lowers the
    probability of the teacher's tokens whatever the teacher gives them, and collapses the policy.
    With the rest these terms cancel.

    Args:
      top_logprobs: of the policy at the teacher's tokens, in nats, of distinct tokens.
      teacher_top_logprobs: of the teacher at the same tokens; no gradient. -inf is a place that has
        no token, if there are fewer than k.
      mask: true where the divergence is needed. Results are 0 elsewhere (gradient stopped). None
        computes all.
      beta: as in `jsd_from_logits`; 1 is the reverse KL.

    Returns:
      The divergence in nats. The probability of the rest is at least 1e-7, without a gradient below
      it: rounded log-probabilities may sum to more than 1.

    Raises:
      ValueError: if `beta` is outside of 0 to 1.

    References:
      "The many faces of on-policy distillation", 2026 (the bias). https://arxiv.org/abs/2605.11182

    Examples:
      >>> policy, teacher = jnp.log(jnp.array([0.25, 0.25])), jnp.log(jnp.array([0.5, 0.25]))
      >>> round(float(top_k_divergence(policy, teacher)), 4)
      0.1733
    """
    check_shapes(top_logprobs=top_logprobs, teacher_top_logprobs=teacher_top_logprobs)
    top_logprobs, mask = rows_of_logits(top_logprobs, mask)
    teacher = jax.lax.stop_gradient(jnp.asarray(teacher_top_logprobs))
    policy, teacher = as_floats(top_logprobs, teacher)
    rows = mask[..., None]
    policy, teacher = (jnp.where(rows, x, -jnp.inf) for x in (policy, teacher))
    policy = jnp.where(teacher == -jnp.inf, -jnp.inf, policy)
    return jsd_from_logits(_with_rest(policy), _with_rest(teacher), mask, beta=beta)


def _with_rest(logprobs: Float[Array, "*batch k"]) -> Float[Array, "*batch events"]:
    """Appends the log-probability of all other tokens."""
    possible = logprobs != -jnp.inf
    probabilities = zero_masked(jnp.exp(zero_masked(logprobs, possible)), possible)
    rest = jnp.maximum(1 - jnp.sum(probabilities, axis=-1, keepdims=True), LEAST_REST)
    return jnp.concatenate([logprobs, jnp.log(rest)], axis=-1)
