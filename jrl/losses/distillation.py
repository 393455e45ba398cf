"""Distillation: advantages that move a policy towards a teacher on the policy's own samples."""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, clip, masked_constants

__all__ = ["distillation_advantages", "extrapolated_distillation_advantages"]


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
