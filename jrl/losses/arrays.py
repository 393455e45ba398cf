"""The array contract in code: masks of any dtype, one working precision, no silent broadcasting.

Every function of this package begins with these few lines, so that the rules of the package
docstring are written once. What is done with the arrays afterwards is left to the other files.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Num, Real, Shaped

# A setting, see jrl/losses/settings.py; and any single number, such as a count or a coefficient.
Number: TypeAlias = Real[ArrayLike, ""]
Scalar: TypeAlias = Num[ArrayLike, ""]

# Arrays inside the library: in the working precision, the mask as bool.
PerToken: TypeAlias = Float[Array, "*batch time"]
PerRow: TypeAlias = Float[Array, "*batch"]
TokenMask: TypeAlias = Bool[Array, "*batch time"]


def as_mask(mask: Shaped[ArrayLike, "*shape"]) -> Bool[Array, "*shape"]:
    """A boolean mask from one of any dtype; anything but zero counts as true."""
    return jnp.asarray(mask).astype(bool)


def as_floats(*arrays: Shaped[ArrayLike, "..."]) -> tuple[Float[Array, "..."], ...]:
    """The arrays in one working precision: float64 where one of them has it, float32 otherwise.

    Half precision is raised rather than kept: a ratio of probabilities, a sum over a batch and a
    squared error all need more than its eight bits. Where no array is of floats, as with integer
    rewards, the precision is JAX's default, which is float64 under ``jax_enable_x64``.
    """
    converted = [jnp.asarray(array) for array in arrays]
    floats = [array.dtype for array in converted if jnp.issubdtype(array.dtype, jnp.floating)]
    double = jnp.float64 in (floats or [jnp.result_type(float)])
    return tuple(array.astype(jnp.float64 if double else jnp.float32) for array in converted)


def zero_masked(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """`x` where the mask is true and zero elsewhere, whatever `x` holds there.

    Applied before any arithmetic, not after it: the derivative of a NaN is a NaN, and a zero
    cotangent multiplied by it stays one.
    """
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def masked_constants(
    mask: Shaped[ArrayLike, "*shape"], **arrays: Shaped[ArrayLike, "*shape"]
) -> tuple[Bool[Array, "*shape"], tuple[Float[Array, "*shape"], ...]]:
    """The mask as bool, and the named arrays in one precision, 0 under it, without gradients."""
    check_shapes(**arrays, mask=mask)
    mask = as_mask(mask)
    constants = jax.lax.stop_gradient(tuple(jnp.asarray(x) for x in arrays.values()))
    return mask, tuple(zero_masked(x, mask) for x in as_floats(*constants))


def num_true(mask: Bool[Array, "*shape"], axis: int | None = None) -> Int[Array, "..."]:
    """Number of true entries, over everything or along one axis."""
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)


def row_lengths(mask: TokenMask, like: Float[Array, "..."]) -> Float[Array, "*batch 1"]:
    """The true tokens of each row, at least 1 so that it divides, in the dtype of `like`."""
    return jnp.maximum(num_true(mask, -1), 1)[..., None].astype(like.dtype)


def row_mean(x: PerToken, mask: TokenMask) -> Float[Array, "*batch 1"]:
    """The mean of each row over its true tokens, 0 where it has none."""
    return jnp.sum(zero_masked(x, mask), axis=-1, keepdims=True) / row_lengths(mask, x)


def ratio_or_zero(x: Float[Array, "..."], divisor: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """``x / divisor``, and 0 where the divisor is 0. A NaN in either stays one."""
    divisor = divisor.astype(x.dtype)
    nothing = divisor == 0
    return jnp.where(nothing, 0, x / jnp.where(nothing, 1, divisor))


def zero_per_row(x: PerToken) -> PerRow:
    """0 for each row, also where rows have no entry at all.

    Made from the rows so that, under `jax.shard_map`, it varies over the devices they do.
    """
    return jnp.zeros_like(jnp.sum(x, axis=-1))


def clip(x: Float[Array, "*shape"], bound: int | float | Array) -> Float[Array, "*shape"]:
    """`x` clamped to plus or minus `bound`.

    Beyond the bounds the derivative is 0, at them 1 (that of `jnp.clip` is a half there).
    """
    return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))


def broadcastable(
    name: str, x: Shaped[ArrayLike, "..."], like: Float[Array, "*shape"]
) -> Float[Array, "..."]:
    """`x` in the dtype of `like`, a scalar or an array with as many axes that broadcasts to it.

    An array of shape `[time]` never meets one of `[batch, time]` by accident of equal sizes.
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
    """`x` in the shape and dtype of `like`, by the rules of `broadcastable`."""
    return jnp.broadcast_to(broadcastable(name, x, like), like.shape)


def check_shapes(**arrays: Shaped[ArrayLike, "..."]) -> None:
    """Check that the named arrays, which all speak about the same tokens, have one shape."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these arrays must have one shape, aligned to the same tokens: {listed}.")


def check_responses(**arrays: Shaped[ArrayLike, "..."]) -> None:
    """Check that the named arrays have one number for each response: one axis, of one size."""
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
    """Check that the named arrays have one entry for each row of the array called `rows_of`."""
    shape = jnp.shape(array)
    for name, entries in per_row.items():
        if not shape or jnp.shape(entries) != shape[:-1]:
            raise ValueError(
                f"{name} has shape {jnp.shape(entries)} and must have one entry for each row of "
                f"{rows_of} {shape}."
            )
