"""Validation and masking of input arrays: any mask dtype, one precision, no silent broadcasting.

The functions of this package begin with calls to these, which implement the rules of the package
docstring.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Num, Real, Shaped

# `Number` is a setting, see jrl/losses/settings.py. `Scalar` is any single number, such as a count
# or a coefficient.
Number: TypeAlias = Real[ArrayLike, ""]
Scalar: TypeAlias = Num[ArrayLike, ""]

# Arrays after validation: floats in the working precision, masks as bool.
PerToken: TypeAlias = Float[Array, "*batch time"]
PerRow: TypeAlias = Float[Array, "*batch"]
TokenMask: TypeAlias = Bool[Array, "*batch time"]


def as_mask(mask: Shaped[ArrayLike, "*shape"]) -> Bool[Array, "*shape"]:
    """Boolean mask from a mask of any dtype; nonzero is true."""
    return jnp.asarray(mask).astype(bool)


def as_floats(*arrays: Shaped[ArrayLike, "..."]) -> tuple[Float[Array, "..."], ...]:
    """Converts arrays to one working precision: float64 if one of them is float64, else float32.

    Half precision is converted to float32: ratios of probabilities, sums over a batch and squared
    errors need more than the 8 significant bits of bfloat16. If no array is floating-point, as with
    integer rewards, the precision is JAX's default, which is float64 under ``jax_enable_x64``.
    """
    converted = [jnp.asarray(array) for array in arrays]
    floats = [array.dtype for array in converted if jnp.issubdtype(array.dtype, jnp.floating)]
    double = jnp.float64 in (floats or [jnp.result_type(float)])
    return tuple(array.astype(jnp.float64 if double else jnp.float32) for array in converted)


def zero_masked(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """`x` where the mask is true and zero elsewhere, also where `x` is NaN or inf.

    Apply it before any arithmetic, not after: the derivative at a NaN is NaN, and stays NaN when
    multiplied by a zero cotangent.
    """
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def masked_constants(
    mask: Shaped[ArrayLike, "*shape"], **arrays: Shaped[ArrayLike, "*shape"]
) -> tuple[Bool[Array, "*shape"], tuple[Float[Array, "*shape"], ...]]:
    """The mask as bool, and the named arrays in one precision, 0 where masked, no gradient."""
    check_shapes(**arrays, mask=mask)
    mask = as_mask(mask)
    constants = jax.lax.stop_gradient(tuple(jnp.asarray(x) for x in arrays.values()))
    return mask, tuple(zero_masked(x, mask) for x in as_floats(*constants))


def num_true(mask: Bool[Array, "*shape"], axis: int | None = None) -> Int[Array, "..."]:
    """Number of true entries, over all axes or along one."""
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)


def row_lengths(mask: TokenMask, like: Float[Array, "..."]) -> Float[Array, "*batch 1"]:
    """Unmasked tokens of each row, at least 1 to be a valid divisor, in the dtype of `like`."""
    return jnp.maximum(num_true(mask, -1), 1)[..., None].astype(like.dtype)


def row_mean(x: PerToken, mask: TokenMask) -> Float[Array, "*batch 1"]:
    """Mean of each row over its unmasked tokens, 0 if it has none."""
    return jnp.sum(zero_masked(x, mask), axis=-1, keepdims=True) / row_lengths(mask, x)


def ratio_or_zero(x: Float[Array, "..."], divisor: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """``x / divisor``, and 0 where the divisor is 0. Other NaNs propagate."""
    divisor = divisor.astype(x.dtype)
    nothing = divisor == 0
    return jnp.where(nothing, 0, x / jnp.where(nothing, 1, divisor))


def zero_per_row(x: PerToken) -> PerRow:
    """0 for each row, also for rows of length 0.

    Computed from `x`, so that under `jax.shard_map` it varies over the same mesh axes.
    """
    return jnp.zeros_like(jnp.sum(x, axis=-1))


def clip(x: Float[Array, "*shape"], bound: int | float | Array) -> Float[Array, "*shape"]:
    """`x` clamped to plus or minus `bound`.

    The derivative is 0 beyond the bounds and 1 at them (`jnp.clip` has 1/2 there).
    """
    return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))


def broadcastable(
    name: str, x: Shaped[ArrayLike, "..."], like: Float[Array, "*shape"]
) -> Float[Array, "..."]:
    """Converts `x` to the dtype of `like` and checks that it broadcasts to it.

    `x` is a scalar or has as many axes as `like`: shape `[time]` does not broadcast to
    `[batch, time]`.
    """
    array = jnp.asarray(x)
    fits = array.ndim == like.ndim and all(
        size in (1, full) for size, full in zip(array.shape, like.shape, strict=True)
    )
    if array.ndim and not fits:
        raise ValueError(
            f"{name} has shape {array.shape}, which does not broadcast to {like.shape}: give it "
            f"the same number of axes, such as {name}[:, None] for one value per row."
        )
    return array.astype(like.dtype)


def broadcast(
    name: str, x: Shaped[ArrayLike, "..."], like: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Broadcasts `x` to the shape and dtype of `like`, by the rules of `broadcastable`."""
    return jnp.broadcast_to(broadcastable(name, x, like), like.shape)


def check_shapes(**arrays: Shaped[ArrayLike, "..."]) -> None:
    """Checks that the named arrays, aligned to the same tokens, have one shape."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these arrays must have one shape, aligned to the same tokens: {listed}.")


def check_responses(**arrays: Shaped[ArrayLike, "..."]) -> None:
    """Checks that the named arrays are `[batch]`, one number per response, of one size."""
    for name, array in arrays.items():
        shape = jnp.shape(array)
        if len(shape) != 1:
            fix = f"sum it over time first, as {name}.sum(-1)" if shape else f"give {name}[None]"
            if name == "groups":
                fix = "all tokens of a response share its group, as groups[:, 0]"
            raise ValueError(
                f"{name} has shape {shape} and must be [batch], one number per response: {fix}."
            )
    check_shapes(**arrays)


def check_rows(
    rows_of: str, array: Shaped[ArrayLike, "..."], **per_row: Shaped[ArrayLike, "..."]
) -> None:
    """Checks that the named arrays have one entry per row of `array`, named `rows_of` in errors."""
    shape = jnp.shape(array)
    for name, entries in per_row.items():
        if not shape or jnp.shape(entries) != shape[:-1]:
            raise ValueError(
                f"{name} has shape {jnp.shape(entries)} and must have one entry for each row of "
                f"{rows_of} {shape}."
            )
