"""Reward shaping before advantages: overlong penalty and filter, dynamic sampling; and pass@k."""

from math import comb
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Real, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, as_mask, broadcast, check_responses, check_rows
from jrl.losses.groups import group_max, group_min, number_groups


def overlong_penalty(
    lengths: Real[ArrayLike, "*batch"],
    *,
    max_length: Number,
    buffer: Number,
    floor: Number | None = -1.0,
) -> Float[Array, "*batch"]:
    """Soft overlong penalty of DAPO: a length penalty for responses close to the maximum length.

    ``clip((max_length - buffer - length) / buffer, floor, 0)``: 0 up to ``max_length - buffer``
    tokens, then decreasing linearly to -1 at `max_length`, and constant beyond (for `floor` -1).

    Args:
      lengths: of the responses, in tokens.
      max_length: maximum response length, in tokens; 20480 in the paper.
      buffer: number of tokens before `max_length` over which the penalty grows; 4096 in the paper.
        0 penalises only responses longer than `max_length`, by 1 per excess token down to `floor`.
      floor: lower bound of the penalty; -1 in the paper and in TRL. None lets it decrease further
        beyond `max_length`, as in verl; up to there the two agree.

    Returns:
      One penalty per response, 0 or negative, to be added to its reward. Leave it out of the
      `scores` of `informative_groups`.

    Raises:
      ValueError: if `buffer` is not between 0 and `max_length`, or `floor` is positive.

    References:
      Yu et al., "DAPO", 2025, eq. 13. https://arxiv.org/abs/2503.14476

    Examples:
      >>> overlong_penalty(jnp.array([60, 80, 90, 100, 120]), max_length=100, buffer=20).tolist()
      [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    longest = settings.number("max_length", max_length)
    rule = f"must lie between 0 and max_length={longest}: both are in tokens."
    limit = None if isinstance(longest, Array) else longest
    buffer = settings.number("buffer", buffer, rule, at_least=0, at_most=limit)
    rule = "must not be positive: it bounds a penalty; None is off."
    floor = settings.optional("floor", floor, rule, at_most=0)
    (lengths,) = as_floats(jax.lax.stop_gradient(lengths))
    # Lengths are integers: with buffer 0, one excess token has the penalty -1.
    over = jnp.maximum(buffer, 1) if isinstance(buffer, Array) else max(buffer, 1)
    return jnp.clip((longest - buffer - lengths) / over, floor, 0)


def overlong_filter(
    mask: Shaped[ArrayLike, "*batch time"], truncated: Shaped[ArrayLike, "*batch"]
) -> Bool[Array, "*batch time"]:
    """Overlong filtering of DAPO: masks responses truncated at the maximum length.

    A truncated response is unfinished: scoring it as wrong penalises its length, not its reasoning.
    With this mask it adds neither to the loss nor to the denominators of `aggregate`. DAPO
    introduces the filter; most of its runs, including the best, use `overlong_penalty` instead. A
    critic can still be trained on the response: pass it the original mask. (TRL:
    ``mask_truncated_completions``.)

    Args:
      mask: true on sampled tokens.
      truncated: one per row, of any dtype; true for responses that reached the length limit.

    Returns:
      True where `mask` is, but nowhere in a truncated response.

    Raises:
      ValueError: if there is not one `truncated` per row.

    References:
      Yu et al., "DAPO", 2025, section 3.4. https://arxiv.org/abs/2503.14476

    Examples:
      >>> overlong_filter(jnp.ones((2, 3)), jnp.array([False, True])).astype(int).tolist()
      [[1, 1, 1], [0, 0, 0]]
    """
    check_rows("mask", mask, truncated=truncated)
    return as_mask(mask) & ~as_mask(truncated)[..., None]


def informative_groups(
    scores: Shaped[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Bool[Array, "batch"]:
    """Dynamic-sampling filter of DAPO: mask of the rows in groups with different scores.

    A group in which all responses are right, or all wrong, has group-relative advantages of 0 and
    no gradient. The test is maximum > minimum, which is exact: no standard deviation is rounded. A
    group of one is not kept (verl keeps it).

    Args:
      scores: the *accuracy* of each response, bool or number. Not the shaped reward: with a length
        penalty, a group in which all are wrong would count as different.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      True for every row of an informative group.

    References:
      Yu et al., "DAPO", 2025, eq. 11. https://arxiv.org/abs/2503.14476

    Examples:
      >>> informative_groups(jnp.array([1, 1, 0, 1]), jnp.array([0, 5, 0, 5])).tolist()
      [True, False, True, False]
    """
    check_responses(scores=scores, groups=groups)
    (scores,) = as_floats(scores)
    index = number_groups(groups)
    return group_max(scores, index) > group_min(scores, index)


def pass_at_k(
    num_samples: Real[ArrayLike, "*#shape"],
    num_correct: Real[ArrayLike, "*shape"],
    k: SupportsIndex,
) -> float | Float[Array, "*shape"]:
    """Unbiased estimate of pass@k: the probability that at least one of k responses is correct.

        1 - C(n - c, k) / C(n, k)

    for n responses of which c are correct: the fraction of subsets of size k with a correct
    response. The plug-in estimate ``1 - (1 - c / n)^k`` is too low. The mean over prompts is the
    pass@k of a benchmark. (`pass_at_k_advantages` has advantages for it as an objective.)

    Concrete scalars use exact integers of any size. Arrays use
    ``-expm1(sum_{i < k} log(1 - c / (n - i)))``, which is accurate for large n and for small
    probabilities.

    Args:
      num_samples: n, responses to a prompt; one number for all prompts, or one for each.
      num_correct: c, the number of correct ones among them, from 0 to n.
      k: size of the subsets, from 1 to n.

    Returns:
      A probability in [0, 1], a float for two concrete numbers, else an array in float32 (float64
      under ``jax_enable_x64``).

    Raises:
      ValueError: if `k` is not in 1..n, or `num_correct` not in 0..n; traced counts are not
        checked.

    References:
      Chen et al., "Evaluating large language models trained on code", 2021, eq. 1.
      https://arxiv.org/abs/2107.03374

    Examples:
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
    # Above 1 if fewer than k are wrong: every subset then has a correct one.
    share = correct[..., None] / jnp.maximum(samples[..., None] - num_removed, 1)
    # abs instead of negation, which would give -0 for 0.
    return jnp.abs(jnp.expm1(jnp.sum(jnp.log1p(-jnp.minimum(share, 1)), axis=-1)))


def _check_counts(num_samples: int, num_correct: int, k: int) -> None:
    """Checks that 0 <= num_correct <= num_samples and k <= num_samples."""
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} must lie in 0..{num_samples}, the samples.")
    if k > num_samples:
        raise ValueError(f"k={k} must lie in 1..{num_samples}, the samples per prompt.")
