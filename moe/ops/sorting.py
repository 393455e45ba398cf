"""Sort of rows by group, and the gathers that follow it, without scatter-adds."""

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from sharding.collectives import match_varying


def sort_by_group(groups: Int[Array, "row"], num_groups: int) -> tuple[Array, Array]:
    """Stable order of rows by group, and the size of each group.

    Rows whose group is `num_groups` or more come last and are not counted.

    Raises:
      ValueError: if the dtype of the ids cannot count all pairs of a group and a row.
    """
    num_rows = groups.shape[0]
    if (num_groups + 1) * num_rows > jnp.iinfo(groups.dtype).max:
        raise ValueError(
            f"{num_rows} rows of {num_groups} groups have more (group, row) pairs than "
            f"{groups.dtype} can count: route fewer rows at a time."
        )
    # One sort of distinct keys: several times as fast as a stable sort of pairs, and as a running
    # count per group if there are many groups.
    keys = jnp.minimum(groups, num_groups) * num_rows + jnp.arange(num_rows, dtype=groups.dtype)
    keys = jnp.sort(keys)
    stop = positions_in(keys, jnp.arange(1, num_groups + 1, dtype=keys.dtype) * num_rows)
    return keys % num_rows, jnp.diff(stop, prepend=0)


def positions_in(
    ascending: Int[Array, "element"],
    values: Int[Array, "value"],
    side: Literal["left", "right"] = "left",
) -> Int[Array, "value"]:
    """`jnp.searchsorted`: a binary search on a CPU, and elsewhere one kernel that compares all
    pairs. There a search is a loop, whose launches take longer than the comparisons."""
    search = partial(jnp.searchsorted, side=side)
    compare = partial(search, method="compare_all")
    return lax.platform_dependent(*match_varying((ascending, values)), cpu=search, default=compare)


def group_of_rows(sizes: Int[Array, "group"], num_rows: int) -> Int[Array, "row"]:
    """Group of each row, one past the last for a row of none."""
    return positions_in(jnp.cumsum(sizes), jnp.arange(num_rows, dtype=sizes.dtype), "right")


def positions_within(groups: Int[Array, "row"], num_groups: int) -> tuple[Array, Array]:
    """Position of each row among the rows of its group, in order, and the size of each group.

    Rows whose group is out of range have no meaningful position and are not counted.
    """
    order, sizes = sort_by_group(groups, num_groups)
    start = take_rows(jnp.cumsum(sizes) - sizes, groups)
    return inverse_slots(order, groups.shape[0]) - start, sizes


def inverse_slots(slots: Int[Array, "row"], num_slots: int) -> Int[Array, "slot"]:
    """Index of the row in each slot; one past the last row in an empty slot."""
    empty = jnp.full((num_slots,), slots.shape[0], jnp.int32)
    return empty.at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def take_rows(x: Shaped[Array, "row *rest"], rows: Int[Array, "*slots"]) -> Shaped[Array, "..."]:
    """`x[rows]`, ``[*slots, *rest]``, with zeros where the index is past the end."""
    return x.at[rows].get(mode="fill", fill_value=0)
