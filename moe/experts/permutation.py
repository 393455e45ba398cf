"""Rows in the order of their groups and back: sorts, slots and gathers without a scatter."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def sort_by_group(groups: Int[Array, "row"], num_groups: int) -> tuple[Array, Array]:
    """The rows in the order of their groups, each group's in their own order, and its sizes.

    Rows whose group is `num_groups` or more come last and are counted nowhere.
    """
    num_rows = groups.shape[0]
    if (num_groups + 1) * num_rows > jnp.iinfo(groups.dtype).max:
        raise ValueError(
            f"{num_rows} rows of {num_groups} groups have more (group, row) pairs than "
            f"{groups.dtype} counts: route fewer rows at a time."
        )
    # One sort of distinct keys: several times as fast as a stable sort of pairs, and as a running
    # count per group where there are many groups.
    keys = jnp.minimum(groups, num_groups) * num_rows + jnp.arange(num_rows, dtype=groups.dtype)
    keys = jnp.sort(keys)
    stop = jnp.searchsorted(keys, jnp.arange(1, num_groups + 1, dtype=keys.dtype) * num_rows)
    return keys % num_rows, jnp.diff(stop, prepend=0)


def positions_within(groups: Int[Array, "row"], num_groups: int) -> tuple[Array, Array]:
    """The position of each row among the rows of its group, in order, and the size of each group.

    Rows whose group is out of range have no meaningful position and are counted nowhere.
    """
    order, sizes = sort_by_group(groups, num_groups)
    start = take_rows(jnp.cumsum(sizes) - sizes, groups)
    return inverse_slots(order, groups.shape[0]) - start, sizes


def inverse_slots(slots: Int[Array, "row"], num_slots: int) -> Int[Array, "slot"]:
    """Which row is in each slot; one past the last row where there is none."""
    empty = jnp.full((num_slots,), slots.shape[0], jnp.int32)
    return empty.at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def take_rows(
    x: Shaped[Array, "row *rest"], rows: Int[Array, "slot"]
) -> Shaped[Array, "slot *rest"]:
    """`x[rows]`, with zeros where the index is past the end."""
    return x.at[rows].get(mode="fill", fill_value=0)


def spread_rows(
    x: Shaped[Array, "row *rest"], rows: Int[Array, "slot"], dtype: jnp.dtype
) -> Shaped[Array, "slot *rest"]:
    """`take_rows` in `dtype`, whose gradient is summed in float32: a row may be taken often."""
    return take_rows(x.astype(jnp.float32), rows).astype(dtype)


@jax.custom_vjp
def permute(
    x: Shaped[Array, "row *rest"], order: Int[Array, "row"], inverse: Int[Array, "row"]
) -> Shaped[Array, "row *rest"]:
    """``x[order]``, of which the gradient is a gather too, by the `inverse` of the permutation.

    XLA would scatter and add, not knowing that no row is taken twice.
    """
    return x[order]


def _permute_forward(x, order, inverse):
    return x[order], (order, inverse)


def _permute_backward(permutation, gradient):
    _, inverse = permutation
    return gradient[inverse], None, None


permute.defvjp(_permute_forward, _permute_backward)
