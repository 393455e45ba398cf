"""Prompts that are run one behind another in the same rows: short ones beside long ones take no
padding."""

from functools import partial
from typing import Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jrl.rollout.decoding.programs.slots import Decoder
from moe.cache.buffers import KEY_COLUMN, VALUE_COLUMN, Cache
from moe.decoding import Prefilled, for_prefill
from moe.model import run_keeping
from moe.router.replay import choices_dtype
from moe.tokens.packing import pack_segments
from moe.weights import Transformer
from sharding.collectives import join_shards, vary, varying

Leaf = TypeVar("Leaf")


@struct.dataclass
class Packing(Generic[Leaf]):
    """Where prompts stand that run together.

    Attributes:
      starts: ``[run]`` place of the first token of each in the rows of its rank, which are counted
        through, row after row; no prompt crosses the end of a row.
      num_rows: on each rank, as wide as the prompts are given.
    """

    starts: Leaf
    num_rows: int = struct.field(pytree_node=False)


def prefilled_packed(
    decoder: Decoder,
    weights: Transformer[Array],
    tokens: Int[Array, "run width"],
    lengths: Int[Array, "run"],
    packing: Packing[Array],
) -> Prefilled:
    """What `programs.slots.prefilled_local` gives, of prompts that are run in fewer rows than there
    are prompts.

    Args:
      tokens: a prompt's begin in its first column.
      lengths: of the prompts; 0 is none.
    """
    config, mesh = for_prefill(decoder.config), decoder.mesh
    (num_runs, width), num_rows = tokens.shape, packing.num_rows
    column = jnp.arange(width, dtype=jnp.int32)[None]
    places, room = packing.starts[:, None] + column, num_rows * width
    into = jnp.where(column < lengths[:, None], places, room)

    def spread(of_runs: Array) -> Array:
        """In their rows; 0 where no prompt stands."""
        axes = tuple(varying(of_runs) | varying(into))
        nothing, values = vary((jnp.zeros(room, jnp.int32), of_runs), axes)
        rows = nothing.at[into].set(jnp.broadcast_to(values, tokens.shape), mode="drop")
        return rows.reshape(num_rows, width)

    numbers = jnp.arange(1, num_runs + 1, dtype=jnp.int32)[:, None]
    ids, segments, positions = (spread(x) for x in (tokens, numbers, column))
    packed = pack_segments(ids, segments, num_runs, mesh, config, positions=positions)
    packed = packed._replace(record_choices=decoder.records_choices)
    # After a prompt's end, what the next one has: nobody looks at it.
    places = jnp.minimum(places, room - 1)
    x, router, kept = run_keeping(partial(_kept, places), weights, packed, config, mesh)
    keys, *values = zip(*kept, strict=True)

    def by_place(of_tokens: Array, chosen: Array) -> Array:
        (rows,) = packed.zigzag.restore(join_shards(of_tokens, mesh.sequence))
        return rows.reshape(room, *rows.shape[2:])[chosen]

    last, choices = jnp.minimum(packing.starts + jnp.maximum(lengths - 1, 0), room - 1), None
    if decoder.records_choices:
        assert router is not None and router.choices is not None
        by_token = jnp.moveaxis(router.choices, 0, 1)
        choices = by_place(by_token, places).astype(choices_dtype(config.num_experts))
    cache = vary(Cache(keys, values[0] if values else ()), mesh.axes)
    return Prefilled(cache, by_place(x, last), choices)


def _kept(places: Int[Array, "run width"], *arrays: Array) -> tuple[Array, ...]:
    """Keys and values of a layer, or narrow vectors, a row for each prompt, as a cache holds
    them."""
    columns = KEY_COLUMN, VALUE_COLUMN
    return tuple(
        jnp.moveaxis(x[places], 1, column) for x, column in zip(arrays, columns, strict=False)
    )
