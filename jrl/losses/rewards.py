"""Rewards before advantages are computed: length penalties, selection of groups, and pass@k."""

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
    """DAPO's soft punishment of responses that come near the limit of length.

    ``clip((max_length - buffer - length) / buffer, floor, 0)``: nothing up to
    ``max_length - buffer`` tokens, then falling linearly to -1 at `max_length`, and -1 beyond.

    Args:
      lengths: of the responses, in tokens.
      max_length: the longest response that is allowed, in tokens; 20480 in the paper.
      buffer: over how many tokens before it the penalty grows; 4096 in the paper. 0 punishes with
        -1 per token what is longer than `max_length`, and nothing else.
      floor: the penalty goes no lower; -1 in the paper and in TRL. None lets it fall on beyond
        `max_length`, as verl does; the two agree up to there.

    Returns:
      One penalty per response, 0 or negative, to be added to its reward. It is not part of the
      accuracy by which `informative_groups` chooses.

    Raises:
      ValueError: if `buffer` does not lie between 0 and `max_length`, or `floor` is positive.

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
    # Lengths are whole, so with an empty buffer one token too many is already the full penalty.
    over = jnp.maximum(buffer, 1) if isinstance(buffer, Array) else max(buffer, 1)
    return jnp.clip((longest - buffer - lengths) / over, floor, 0)


def overlong_filter(
    mask: Shaped[ArrayLike, "*batch time"], truncated: Shaped[ArrayLike, "*batch"]
) -> Bool[Array, "*batch time"]:
    """The mask without the responses that the length limit cut off.

    Such a response was not judged but interrupted, and a reward of "wrong" teaches something else
    than it seems to. With this mask it adds neither a loss nor a token to the denominators of
    `aggregate`. DAPO introduces the filter; most of its runs, the best among them, use
    `overlong_penalty` instead. A critic may learn from the response all the same: give it the mask
    as it was. (TRL: ``mask_truncated_completions``.)

    Args:
      mask: true on sampled tokens.
      truncated: true for each response that ended for lack of room, of any dtype.

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
    """Rows whose group holds different scores, the ones that DAPO's dynamic sampling keeps.

    A group in which all responses are right, or all wrong, has group-relative advantages of 0 and
    teaches nothing. "Different" is meant exactly (the greatest is above the least), so no rounding
    of a standard deviation is involved. A group of one has nothing to differ from and is not kept
    (verl keeps it).

    Args:
      scores: the *accuracy* of each response, bool or number. Not the shaped reward: a length
        penalty would make groups differ that are all wrong.
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
    """Check that the counts of a prompt go together."""
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} must lie in 0..{num_samples}, the samples.")
    if k > num_samples:
        raise ValueError(f"k={k} must lie in 1..{num_samples}, the samples per prompt.")
