"""Sums and extremes over the rows that share a prompt, for groups named by any integers.

Rows of a group need not be neighbours, nor groups of one size. All of it traces under `jax.jit`: as
many groups as rows are provided for, which is always enough and costs one number per row.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Integer, Shaped

from jrl.losses.arrays import as_floats, check_responses


def number_groups(groups: Integer[ArrayLike, "batch"]) -> Int[Array, "batch"]:
    """The same groups, named 0, 1, 2, ... in increasing order of their names."""
    groups = jnp.asarray(groups)
    _, index = jnp.unique(groups, return_inverse=True, size=groups.size)
    return index


def check_groups(
    groups: Integer[ArrayLike, "batch"], **numbers: Shaped[ArrayLike, "..."]
) -> tuple[Array, ...]:
    """Numbers of responses in one working precision, without a gradient, and `number_groups`."""
    check_responses(**numbers, groups=groups)
    floats = as_floats(*jax.lax.stop_gradient(tuple(numbers.values())))
    return *floats, number_groups(groups)


def isolate_uncounted(
    x: Float[Array, "batch"], index: Int[Array, "batch"], counts: Bool[Array, "batch"]
) -> tuple[Float[Array, "batch"], Int[Array, "batch"]]:
    """`x` and groups in which the rows that do not count are alone, each with a 0.

    Whatever such a row holds, NaN included, no other row then hears of it.
    """
    singleton_groups = x.size + jnp.arange(x.size, dtype=index.dtype)
    return jnp.where(counts, x, 0), number_groups(jnp.where(counts, index, singleton_groups))


def group_sum(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """The sum of `x` over each row's group, repeated on every row of it."""
    return jax.ops.segment_sum(x, index, num_segments=x.size)[index]


def group_min(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """The least `x` in each row's group, repeated on every row of it."""
    return jax.ops.segment_min(x, index, num_segments=x.size)[index]


def group_max(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """The greatest `x` in each row's group, repeated on every row of it."""
    return jax.ops.segment_max(x, index, num_segments=x.size)[index]


def group_size(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """The number of rows in each row's group, in the dtype of `x`."""
    return group_sum(jnp.ones_like(x), index)


def group_centred(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """`x` minus the mean of its group, exactly 0 where the whole group is equal.

    Taken relative to the least of the group before anything is averaged, so that the mean of equal
    numbers is not off by a rounding, which a division by ``epsilon`` would then blow up. Equality
    is asked for as well: a compiler may fuse the subtraction with what made `x`, without the
    rounding that the least went through.
    """
    least = group_min(x, index)
    above_least = x - least
    centred = above_least - group_sum(above_least, index) / group_size(x, index)
    return jnp.where(group_max(x, index) == least, 0, centred)
