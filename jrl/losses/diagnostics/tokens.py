"""Helpers of the diagnostics: positions of unmasked tokens, means, sums per bin."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Num

from jrl.losses.arrays import TokenMask, num_true, ratio_or_zero, zero_masked


def index(mask: TokenMask) -> Int[Array, "*batch time"]:
    """For each true token, how many true ones come before it in its row."""
    return jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - mask.astype(jnp.int32)


def last(mask: TokenMask) -> TokenMask:
    """True on the last true token of each row."""
    return mask & (index(mask) == num_true(mask, -1)[..., None] - 1)


def mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """The mean over everything that is true, 0 where nothing is."""
    return ratio_or_zero(jnp.sum(zero_masked(x, mask)), num_true(mask))


def per_bin(
    x: Num[Array, "*shape"], bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], num_bins: int
) -> Num[Array, "bins"]:
    """The sum of `x` over what is true in each bin."""
    return jax.ops.segment_sum(
        zero_masked(x, mask).reshape(-1), zero_masked(bins, mask).reshape(-1), num_segments=num_bins
    )


def counts(
    bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], num_bins: int
) -> Int[Array, "bins"]:
    """Number of true entries in each bin."""
    return per_bin(mask.astype(jnp.int32), bins, mask, num_bins)


def buckets(lengths: Int[Array, "*batch"], edges: Sequence[int]) -> Int[Array, "*batch"]:
    """In which bucket each length falls: bucket i holds what is above edge i-1 and up to edge i."""
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"edges={tuple(edges)} must increase: they are lengths in tokens.")
    bounds = jnp.asarray(tuple(edges), jnp.int32)
    # Edges are few: comparing all pairs is one kernel, a search a loop of several.
    return jnp.searchsorted(bounds, lengths.astype(jnp.int32), method="compare_all")
