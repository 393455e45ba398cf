"""pass@k: estimate of a policy's success rate from sampled responses."""

from math import comb
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, Real

from jrl.losses import settings
from jrl.losses.arrays import as_floats, broadcast


def pass_at_k(
    num_samples: Real[ArrayLike, "*#shape"],
    num_correct: Real[ArrayLike, "*shape"],
    k: SupportsIndex,
) -> float | Float[Array, "*shape"]:
    """The chance that at least one of k responses is correct, without bias.

        1 - C(n - c, k) / C(n, k)

    from n responses of which c are correct: of all choices of k of them, the share with a correct
    one. The obvious ``1 - (1 - c / n)^k`` is too low. The mean over prompts is the pass@k of a
    benchmark. (Advantages for it as an objective are `pass_at_k_advantages`.)

    Known numbers are counted exactly, however large they are. Arrays are worked out as
    ``-expm1(sum_{i < k} log(1 - c / (n - i)))``, in which neither a large n nor a small chance
    loses digits.

    Args:
      num_samples: n, the responses to a prompt; one number for all prompts, or one for each.
      num_correct: c, how many of them are correct, from 0 to n.
      k: how many are drawn, from 1 to n.

    Returns:
      A chance from 0 to 1, a float from two numbers, otherwise an array in float32 (float64 where
      JAX has it).

    Raises:
      ValueError: if `k` is not in 1..n, or `num_correct` not in 0..n; of counts that are traced
        neither can be checked.

    References:
      Chen et al., "Evaluating large language models trained on code", 2021, eq. 1.
      https://arxiv.org/abs/2107.03374

    Examples:
      >>> import jax.numpy as jnp
      >>> pass_at_k(4, 1, k=2)
      0.5
      >>> pass_at_k(4, jnp.array([0, 1, 3]), k=2).tolist()
      [0.0, 0.5, 1.0]
    """
    k = settings.integer("k", k, "must lie in 1..num_samples, the samples per prompt.", at_least=1)
    counts: dict[str, Any] = {"num_samples": num_samples, "num_correct": num_correct}
    if not any(isinstance(x, Tracer) or jnp.ndim(x) for x in counts.values()):
        rule = "counts responses and cannot be negative."
        n, c = (settings.integer(name, x, rule, at_least=0) for name, x in counts.items())
        _check_counts(n, c, k)
        return 1.0 - comb(n - c, k) / comb(n, k)
    (correct,) = as_floats(num_correct)
    samples = broadcast("num_samples", num_samples, correct)
    if correct.size and not isinstance(samples - correct, Tracer):
        wrong = jnp.argmin(jnp.minimum(correct, samples - correct))
        _check_counts(int(samples.ravel()[wrong]), int(correct.ravel()[wrong]), 1)
        _check_counts(int(samples.min()), 0, k)
    num_removed = jnp.arange(k, dtype=correct.dtype).reshape(*(1,) * correct.ndim, k)
    # Above 1 where fewer than k are wrong: every choice has a correct one.
    share = correct[..., None] / jnp.maximum(samples[..., None] - num_removed, 1)
    # Its size, as the negative of 0 would be -0.
    return jnp.abs(jnp.expm1(jnp.sum(jnp.log1p(-jnp.minimum(share, 1)), axis=-1)))


def _check_counts(num_samples: int, num_correct: int, k: int) -> None:
    """Check that the counts of a prompt go together.

    Raises:
      ValueError: if they do not.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} must lie in 0..{num_samples}, the samples.")
    if k > num_samples:
        raise ValueError(f"k={k} must lie in 1..{num_samples}, the samples per prompt.")
