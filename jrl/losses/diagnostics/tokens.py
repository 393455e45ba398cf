"""Helpers of the diagnostics: counts of unmasked tokens, sums per bin, moments."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from jrl.losses.arrays import as_floats, as_mask, zero_masked


def hidden(
    mask: Shaped[ArrayLike, "*batch time"], *arrays: Shaped[ArrayLike, "*batch time"]
) -> tuple[Bool[Array, "*batch time"], tuple[Float[Array, "*batch time"], ...]]:
    """The mask as bool, and the arrays in one precision, 0 under it, without gradients."""
    mask = as_mask(mask)
    return mask, tuple(zero_masked(x, mask) for x in as_floats(*jax.lax.stop_gradient(arrays)))


def count(mask: Bool[Array, "*shape"], axis: int | None = None) -> Int[Array, "..."]:
    """Number of true entries."""
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)


def index(mask: Bool[Array, "*batch time"]) -> Int[Array, "*batch time"]:
    """For each true token, how many true ones come before it in its row."""
    return jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - mask.astype(jnp.int32)


def last(mask: Bool[Array, "*batch time"]) -> Bool[Array, "*batch time"]:
    """True on the last true token of each row."""
    return mask & (index(mask) == count(mask, -1)[..., None] - 1)


def ratio(numerator: Float[Array, "..."], denominator: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """``part / whole`` entry by entry, and 0 of nothing."""
    denominator = denominator.astype(numerator.dtype)
    nothing = denominator == 0
    quotient = numerator / jnp.where(nothing, jnp.ones_like(denominator), denominator)
    return jnp.where(nothing, jnp.zeros_like(quotient), quotient)


def row_mean(
    x: Float[Array, "*batch time"], mask: Bool[Array, "*batch time"]
) -> Float[Array, "*batch"]:
    """The mean of each row over its true tokens, 0 where it has none."""
    return jnp.sum(zero_masked(x, mask), axis=-1) / jnp.maximum(count(mask, -1), 1).astype(x.dtype)


def mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """The mean over everything that is true, 0 where nothing is."""
    return ratio(jnp.sum(zero_masked(x, mask)), count(mask))


def per_bin(
    x: Float[Array, "*shape"], bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], number: int
) -> Float[Array, "bins"]:
    """The sum of `x` over what is true in each bin."""
    return jax.ops.segment_sum(
        zero_masked(x, mask).reshape(-1), zero_masked(bins, mask).reshape(-1), num_segments=number
    )


def counts(
    bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], number: int
) -> Int[Array, "bins"]:
    """Number of true entries in each bin."""
    ones = mask.astype(jnp.int32).reshape(-1)
    return jax.ops.segment_sum(ones, zero_masked(bins, mask).reshape(-1), num_segments=number)


def buckets(lengths: Int[Array, "*batch"], edges: Sequence[int]) -> Int[Array, "*batch"]:
    """In which bucket each length falls: bucket i holds what is above edge i-1 and up to edge i.

    Raises:
      ValueError: if the edges do not increase.
    """
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"edges={tuple(edges)} must increase: they are lengths in tokens.")
    return jnp.searchsorted(jnp.asarray(tuple(edges), jnp.int32), lengths.astype(jnp.int32))
