"""Term of a teacher in the advantages of a step (on-policy distillation)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import Mean, distillation_advantages
from jrl.recipes.base.batch import TEACHER, Batch, required
from jrl.recipes.base.hyperparameters import Hyperparameters

FAR = 5.0
"""Nats by which a token that is far from the teacher is less likely under it."""
UNSCORED = "teacher/unscored"
"""Fraction of responses whose log-probabilities under the teacher are not finite."""


class TeacherFailed(RuntimeError):
    """Raised when a teacher gives no finite log-probabilities for a whole step."""


def add_teacher(
    recipe: Hyperparameters,
    batch: Batch[Array],
    advantages: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
) -> tuple[Float[Array, "batch time"], Bool[Array, "batch time"], dict[str, Array]]:
    """Adds `distillation_advantages` of the sampled tokens; returns advantages, loss mask and
    metrics. A response that the teacher cannot score is removed from the mask.

    Args:
      batch: the whole batch of a step, with old and the teacher's log-probabilities. If it has the
        divergence from the teacher, that is the baseline.
      mask: tokens of the policy's loss.
    """
    policy, teacher = required(batch.old_logprobs), batch.logprobs[TEACHER]
    finite = jnp.all(jnp.isfinite(teacher) | ~mask, axis=1)
    scored = mask & finite[:, None]
    kl = batch.kl.get(TEACHER)
    term = distillation_advantages(policy, teacher, scored, coefficient=recipe.teacher_coef, kl=kl)
    gap = policy - teacher
    metrics = {
        "teacher/gap": Mean.of(gap, scored),
        "teacher/far": Mean.of((gap > FAR).astype(jnp.float32), scored),
        "teacher/agreement": Mean.of(batch.argmax[TEACHER], scored),
        UNSCORED: Mean.of((~finite).astype(jnp.float32), jnp.any(mask, axis=1)),
    }
    if kl is not None:
        metrics["teacher/kl"] = Mean.of(kl, scored)
    return advantages + term, scored, {name: mean.value() for name, mean in metrics.items()}


def check_teacher(recipe: Hyperparameters, unscored: float) -> None:
    """Raises TeacherFailed if the teacher could score no response of a step.

    Args:
      unscored: fraction of the responses that it could not score.
    """
    if unscored == 1.0:
        raise TeacherFailed(
            f"the teacher {recipe.teacher} gives log-probabilities that are not finite for every "
            "response of a step: its weights are damaged or overflow their dtype, so give "
            "another --teacher, or --teacher-dtype float32."
        )
