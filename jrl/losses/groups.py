"""Sums, minima and maxima over groups: the rows that share a prompt, by any integer ids.

Rows of a group need not be adjacent, and groups may differ in size. All functions trace under
`jax.jit`: the number of segments is the number of rows, an upper bound of the number of groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Integer, Shaped

from jrl.losses import settings
from jrl.losses.arrays import as_floats, check_responses


def number_groups(groups: Integer[ArrayLike, "batch"]) -> Int[Array, "batch"]:
    """Group index 0, 1, 2, ... of each row, in increasing order of the group ids."""
    if settings.is_array(groups) and not isinstance(groups, Array):
        groups = _number_in_python(groups)
    groups = jnp.asarray(groups)
    _, index = jnp.unique(groups, return_inverse=True, size=groups.size)
    return index


def _number_in_python(groups: Any) -> Int[Array, "batch"]:
    """`number_groups` of a NumPy array: JAX would cut ids of 64 bits to 32 and merge groups."""
    ids = groups.tolist()
    index = {group: number for number, group in enumerate(sorted(set(ids)))}
    return jnp.asarray([index[group] for group in ids], jnp.int32)


def check_groups(
    groups: Integer[ArrayLike, "batch"], **numbers: Shaped[ArrayLike, "..."]
) -> tuple[Array, ...]:
    """Checked `numbers` per response, in one precision without a gradient, then `number_groups`."""
    check_responses(**numbers, groups=groups)
    floats = as_floats(*jax.lax.stop_gradient(tuple(numbers.values())))
    return *floats, number_groups(groups)


def isolate_uncounted(
    x: Float[Array, "batch"], index: Int[Array, "batch"], counts: Bool[Array, "batch"]
) -> tuple[Float[Array, "batch"], Int[Array, "batch"]]:
    """Replaces uncounted rows by 0, each in a group of its own; returns `x` and the new index.

    Their values, NaN included, then do not affect other rows.
    """
    singleton_groups = x.size + jnp.arange(x.size, dtype=index.dtype)
    return jnp.where(counts, x, 0), number_groups(jnp.where(counts, index, singleton_groups))


def group_sum(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Sum of `x` over the group of each row, one entry per row."""
    return jax.ops.segment_sum(x, index, num_segments=x.size)[index]


def group_min(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Minimum of `x` over the group of each row, one entry per row."""
    return jax.ops.segment_min(x, index, num_segments=x.size)[index]


def group_max(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Maximum of `x` over the group of each row, one entry per row."""
    return jax.ops.segment_max(x, index, num_segments=x.size)[index]


def group_size(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Number of rows in the group of each row, in the dtype of `x`."""
    return group_sum(jnp.ones_like(x), index)


def group_centred(x: Float[Array, "batch"], index: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """`x` minus the mean of its group, exactly 0 in a group without variance.

    The group's minimum is subtracted before averaging. The mean of equal numbers then has no
    rounding error, which a division by ``epsilon`` would amplify. Equality of maximum and minimum
    is tested too, as the compiler may fuse the subtraction with the computation of `x` and skip the
    rounding of the minimum.
    """
    least = group_min(x, index)
    above_least = x - least
    centred = above_least - group_sum(above_least, index) / group_size(x, index)
    return jnp.where(group_max(x, index) == least, 0, centred)
