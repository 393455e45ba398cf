"""Prefill and the one-token step.

A row's token at position p has its keys and values in column p, whatever the other rows do: rows
stand at different positions, and what a row computes does not depend on when it came. The cache is
one buffer per layer, key and value, or one for all layers of a stack that is scanned
(`moe.layers.depth`), written in place: a loop that carries it never copies it.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.attention.delta.sequences import DeltaCore, DeltaState, one_step
from moe.attention.delta.weights import DeltaNet
from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention
from moe.attention.mask import Window
from moe.attention.rotation import Turns
from moe.cache.buffers import Cache, cache_of, kept_columns
from moe.cache.step import StepCore
from moe.config import ModelConfig
from moe.embedding import embed
from moe.head import logits_of
from moe.layers.block import block
from moe.layers.depth import depth_of, is_stack, runs_of
from moe.model import run_keeping
from moe.precision import rms_norm
from moe.router.overflow import overflow_of
from moe.router.statistics import layers_in_order
from moe.tokens.packing import PackedBatch, pack_rows
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Layer, Transformer
from sharding.collectives import join_shards
from sharding.folding import FoldedMesh


class Prefilled(NamedTuple):
    """What running rows of tokens leaves behind.

    Attributes:
      cache: as long as the rows, with rubbish in the columns after each row's tokens.
      states: ``[row, d_model]`` the last hidden state of each row's last token, the same on every
        rank of ``tp``.
      choices: ``[row, column, layer, k]`` the experts that each token chose, `num_experts` after
        each row's tokens; None where they were not asked for.
      overflow: ``[]`` choices on all devices that found no room at their experts: unless it is 0,
        the rows have to run again with room for any routing (`Execution.buffer_factor`). None where
        there is.
    """

    cache: Cache[Array]
    states: Array
    choices: Array | None
    overflow: Array | None = None


def prefill(
    weights: Transformer[Array],
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool = False,
) -> Prefilled:
    """Runs rows of tokens and keeps their keys and values.

    Args:
      tokens: a row's begin in its first column; what follows them is not looked at.
      lengths: tokens of each row.
      record_choices: whether to give the experts that each token chose.

    Raises:
      ValueError: on a layout with ``cp``: a cache holds whole rows.
    """
    if mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: a cache of keys and values holds whole rows, so decoding runs "
            "without context parallelism; cp must be 1."
        )
    config = for_prefill(config)
    packed = packed_prefill(tokens, lengths, config, mesh, record_choices)
    keep = partial(kept_columns, tokens.shape)
    x, router, kept = run_keeping(keep, weights, packed, config, mesh)
    chosen = None
    if record_choices:
        assert router is not None
        chosen = router.choices
        assert chosen is not None
    states, choices = by_row(x, chosen, packed, lengths, mesh)
    return Prefilled(cache_of(kept), states, choices, overflow_of(router, config))


def for_prefill(config: ModelConfig) -> ModelConfig:
    """The network as rows of tokens run that are gone on with: no backward pass follows, and no
    token is dropped."""
    execution = replace(config.execution, remat="none", fsdp=False, two_batch_overlap=False)
    return replace(config, execution=execution, capacity_factor=None)


def packed_prefill(
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool,
) -> PackedBatch:
    """The rows of `prefill` as its layers take them."""
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    packed = pack_rows(tokens, valid, mesh, config)
    return packed._replace(record_choices=record_choices)


def by_row(
    x: Float[Array, "local d_model"],
    chosen: Int[Array, "layer local k"] | None,
    packed: PackedBatch,
    lengths: Int[Array, "row"],
    mesh: FoldedMesh,
) -> tuple[Array, Array | None]:
    """States and choices as in `Prefilled`, of the last hidden states and choices of all tokens."""
    (of_rows,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states, choices = jnp.take_along_axis(of_rows, last, axis=1)[:, 0], None
    if chosen is not None:
        by_token = join_shards(jnp.moveaxis(chosen, 0, 1), mesh.sequence)
        (choices,) = packed.zigzag.restore(by_token)
    return states, choices


def for_step(config: ModelConfig) -> ModelConfig:
    """The network as a step of decoding runs it: its few tokens go to the experts at once."""
    execution = replace(config.execution, expert_chunks=1)
    # A step cannot be run again because its buffers were too small, and has few tokens.
    config = replace(config, execution=execution, capacity_factor=None)
    return config.for_any_routing()


def packed_step(
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    core: CoreAttention | LatentCore | None = None,
    record_choices: bool = False,
    turns: Turns | None = None,
) -> PackedBatch:
    """One token of each row as a layer takes them; nothing is learned of them."""

    def of_layer(index: int | Array, window: Window = None) -> CoreAttention | LatentCore:
        assert core is not None
        return core

    return PackedBatch(
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        core_attention_of_layer=of_layer,
        sequences=None,
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
        turns=turns,
    )


def decode_step(
    layers: tuple[Layer[Array], ...],
    weights: Transformer[Array],
    cache: Cache[Array],
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool = False,
    turns: Turns | None = None,
) -> tuple[Float[Array, "local vocab"], Cache[Array], Int[Array, "row layer k"] | None]:
    """Appends one token to every live row and scores the next.

    Args:
      layers: the layers of `weights` in the parts of `moe.layers.depth.parts_of`, taken apart once
        outside the loop.
      cache: of live rows written at `positions`, in place when the caller gives it up; other rows
        stay as they are.
      tokens: the tokens to append.
      positions: where in its row each token stands, from 0; less than the cache's columns.
      live: rows that are going; what is computed for the others is rubbish.
      record_choices: whether to give the experts that each token chose.
      turns: of all places that tokens may stand at, made once outside the loop; None makes those of
        the tokens.

    Raises:
      ValueError: where `Execution.decode_attention` names what cannot serve.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the choices, `num_experts`
      where a row is not live; None where they were not asked for.
    """
    config = for_step(config)
    own = None if turns is None else turns.at(positions)
    packed = packed_step(tokens, positions, live, record_choices=record_choices, turns=own)
    step = _Step(packed, positions, live, config, mesh)
    x, kept, choices, first = embed(weights, tokens, config, mesh), [], [], 0
    # Narrow vectors are keys and values.
    of_heads = zip(cache.keys, *[cache.values] * bool(cache.values), strict=True)
    of_deltas = zip(cache.states, cache.tails, strict=True)
    for run in runs_of(layers, config):
        buffers = tuple(
            DeltaState(*next(of_deltas)) if _is_delta(part) else next(of_heads) for part in run
        )
        x, buffers, chosen = _after_run(step, first, run, x, buffers)
        first += depth_of(run)
        kept += buffers
        if chosen is not None:
            choices.append(chosen)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    chosen = None
    if record_choices:
        chosen = join_shards(jnp.moveaxis(jnp.concatenate(choices), 0, 1), mesh.sequence)
    return logits_of(weights, x, config, mesh), cache_of(kept), chosen


class _Step(NamedTuple):
    """What all layers of a step are given."""

    packed: PackedBatch
    positions: Int[Array, "row"]
    live: Bool[Array, "row"]
    config: ModelConfig
    mesh: FoldedMesh


Buffers = DeltaState | tuple[Array, ...]
"""What a part of the layers keeps: keys and, but with narrow vectors, values, or the states of
Gated DeltaNet."""


def _is_delta(part: Layer[Array]) -> bool:
    return isinstance(part.attention, DeltaNet)


def _after_run(
    step: _Step,
    first: int,
    run: tuple[Layer[Array], ...],
    x: Array,
    buffers: tuple[Buffers, ...],
) -> tuple[Array, tuple[Buffers, ...], Array | None]:
    """A run of `moe.layers.depth.runs_of`: a layer, or a stack that is scanned.

    Args:
      first: the number of its first layer.
      buffers: of each part.

    Returns:
      The hidden states; the buffers; choices ``[layer, local, k]``, None where they were not asked
      for or none are made.
    """
    if not is_stack(run[0]):
        x, own, chosen = _after_layer(step, first, run[0], x, buffers[0], ())
        return x, (own,), None if chosen is None else chosen[None]

    def after_period(
        carry: tuple[Array, tuple[Buffers, ...]], given: tuple[Array, tuple[Layer[Array], ...]]
    ) -> tuple[tuple[Array, tuple[Buffers, ...]], list[Array | None]]:
        (x, before), (number, layers) = carry, given
        after, choices = list[Buffers](), list[Array | None]()
        for place, layer in enumerate(layers):
            of_layer = first + number * len(run) + place
            x, own, chosen = _after_layer(step, of_layer, layer, x, before[place], (number,))
            after.append(own)
            choices.append(chosen)
        return (x, tuple(after)), choices

    # The buffers are carried, and a layer writes its part of them: as what a scan takes layer by
    # layer and gives back, all that they hold would be copied.
    numbers = jnp.arange(run[0].norm.shape[0])
    (x, buffers), choices = lax.scan(after_period, (x, buffers), (numbers, run))
    made = [chosen for chosen in choices if chosen is not None]
    return x, buffers, layers_in_order(*made) if made else None


def _after_layer(
    step: _Step,
    number: int | Array,
    layer: Layer[Array],
    x: Array,
    before: Buffers,
    place: tuple[Array, ...],
) -> tuple[Array, Buffers, Array | None]:
    """A layer of the network, what its buffers hold then, and its choices.

    Args:
      place: which layer of buffers that have layers in front.
    """
    if isinstance(before, DeltaState):
        assert step.config.delta is not None
        # Rows that are not live stay as they are.
        own = DeltaState(*(_at(x, place) for x in before))
        after = list[DeltaState]()
        advance = partial(one_step, step.config.delta, own, step.live)
        core = DeltaCore(advance).watched(after.append)
        x, router = block(layer, x, step.packed, core, step.config, step.mesh, number)
        kept: Buffers = DeltaState(
            *(_with_at(x, new, place) for x, new in zip(before, *after, strict=True))
        )
    else:
        keys, values = before[0], before[1] if len(before) > 1 else None
        core = StepCore(step.config, number, keys, values, step.positions, step.live, place)
        x, router = block(layer, x, step.packed, core.attend, step.config, step.mesh, number)
        kept = tuple(own for own in (core.keys, core.values) if own is not None)
    return x, kept, None if router is None else router.choices


def _at(buffer: Array, place: tuple[Array, ...]) -> Array:
    return lax.dynamic_index_in_dim(buffer, *place, keepdims=False) if place else buffer


def _with_at(buffer: Array, new: Array, place: tuple[Array, ...]) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, new, *place, axis=0) if place else new
