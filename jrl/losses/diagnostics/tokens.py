"""Shared functions of the diagnostics: positions of tokens in the mask, means, sums per bin."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Num

from jrl.losses.arrays import TokenMask, num_true, ratio_or_zero, zero_masked


def index(mask: TokenMask) -> Int[Array, "*batch time"]:
    """Number of tokens in the mask that precede each token in its row."""
    return jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - mask.astype(jnp.int32)


def last(mask: TokenMask) -> TokenMask:
    """True on the last token in the mask of each row."""
    return mask & (index(mask) == num_true(mask, -1)[..., None] - 1)


def mean(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean of `x` over the entries in the mask; 0 if there are none."""
    return ratio_or_zero(jnp.sum(zero_masked(x, mask)), num_true(mask))


def per_bin(
    x: Num[Array, "*shape"], bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], num_bins: int
) -> Num[Array, "bins"]:
    """Sum of `x` over the entries in the mask, per bin."""
    return jax.ops.segment_sum(
        zero_masked(x, mask).reshape(-1), zero_masked(bins, mask).reshape(-1), num_segments=num_bins
    )


def counts(
    bins: Int[Array, "*shape"], mask: Bool[Array, "*shape"], num_bins: int
) -> Int[Array, "bins"]:
    """Number of entries in the mask, per bin."""
    return per_bin(mask.astype(jnp.int32), bins, mask, num_bins)


def buckets(lengths: Int[Array, "*batch"], edges: Sequence[int]) -> Int[Array, "*batch"]:
    """Bucket of each length: bucket i has the lengths above edge i-1 and up to edge i."""
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"edges={tuple(edges)} must increase: they are lengths in tokens.")
    bounds = jnp.asarray(tuple(edges), jnp.int32)
    # Edges are few: comparing all pairs is one kernel, a binary search a loop of several.
    return jnp.searchsorted(bounds, lengths.astype(jnp.int32), method="compare_all")
