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
from moe.attention.latent import LatentCore, keeps_narrow
from moe.attention.layer import CoreAttention
from moe.attention.mask import Window
from moe.cache.buffers import Cache, cache_of, kept_columns
from moe.cache.step import StepCore
from moe.config import ModelConfig
from moe.embedding import embed
from moe.head import logits_of
from moe.layers.block import block
from moe.layers.depth import is_stack
from moe.model import run_keeping
from moe.precision import rms_norm
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
    """

    cache: Cache[Array]
    states: Array
    choices: Array | None


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
    return Prefilled(cache_of(kept), states, choices)


def for_prefill(config: ModelConfig) -> ModelConfig:
    """The network as rows of tokens run that are gone on with: no backward pass follows."""
    execution = replace(
        config.execution, remat="none", fsdp=False, buffer_factor=None, two_batch_overlap=False
    )
    return replace(_dropless(config), execution=execution)


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
    return _dropless(replace(config, execution=execution))


def packed_step(
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    core: CoreAttention | LatentCore | None = None,
    record_choices: bool = False,
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

    Raises:
      ValueError: where `Execution.decode_attention` names what cannot serve.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the choices, `num_experts`
      where a row is not live; None where they were not asked for.
    """
    config, narrow_cache = for_step(config), keeps_narrow(config)
    packed = packed_step(tokens, positions, live, record_choices=record_choices)
    step = _Step(packed, positions, live, config, mesh)
    x, kept, choices, first = embed(weights, tokens, config, mesh), [], [], 0
    values_of_parts = [None] * len(cache.keys) if narrow_cache else cache.values
    buffers_of_heads = zip(cache.keys, values_of_parts, strict=True)
    buffers_of_deltas = zip(cache.states, cache.tails, strict=True)
    for part in layers:
        if isinstance(part.attention, DeltaNet):
            after = _delta_step(step, first, part, x, DeltaState(*next(buffers_of_deltas)))
        else:
            after = _attention_step(step, first, part, x, *next(buffers_of_heads))
        first += part.norm.shape[0] if is_stack(part) else 1
        x = after.x
        kept.append(after.kept)
        if after.choices is not None:
            choices.append(after.choices)
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


class _After(NamedTuple):
    """What comes after a part of the layers.

    Attributes:
      x: the hidden states.
      kept: the part's buffers, as `moe.cache.buffers.cache_of` takes them.
      choices: ``[layer, local, k]``, None where they were not asked for or none are made.
    """

    x: Array
    kept: tuple[Array, ...]
    choices: Array | None


def _attention_step(
    step: _Step, first: int, part: Layer[Array], x: Array, keys: Array, values: Array | None
) -> _After:
    """Layers with a cache of keys and values: one, or a stack that is scanned.

    Args:
      first: the number of the first layer.
    """

    def run_layer(
        carry: tuple[Array, Array, Array | None],
        number: int | Array,
        layer: Layer[Array],
        place: tuple[Array, ...],
    ) -> tuple[tuple[Array, Array, Array | None], Array | None]:
        """A layer of the network, and where its keys and values lie in their buffers."""
        x, keys, values = carry
        core = StepCore(step.config, number, keys, values, step.positions, step.live, place)
        x, router = block(layer, x, step.packed, core.attend, step.config, step.mesh, number)
        return (x, core.keys, core.values), None if router is None else router.choices

    carry = x, keys, values
    if is_stack(part):
        # The buffers are carried, and a layer writes its part of them: as what a scan takes
        # layer by layer and gives back, all that they hold would be copied.
        carry, choices = lax.scan(
            lambda carry, given: run_layer(carry, first + given[0], given[1], (given[0],)),
            carry,
            (jnp.arange(part.norm.shape[0]), part),
        )
    else:
        carry, chosen = run_layer(carry, first, part, ())
        choices = None if chosen is None else chosen[None]
    x, *buffers = carry
    return _After(x, tuple(own for own in buffers if own is not None), choices)


def _delta_step(
    step: _Step, number: int, layer: Layer[Array], x: Array, before: DeltaState
) -> _After:
    """A layer with Gated DeltaNet; rows that are not live stay as they are."""
    assert step.config.delta is not None
    after = list[DeltaState]()
    core = DeltaCore(partial(one_step, step.config.delta, before, step.live)).watched(after.append)
    x, router = block(layer, x, step.packed, core, step.config, step.mesh, number)
    chosen = None if router is None else router.choices
    return _After(x, after[0], None if chosen is None else chosen[None])


def _dropless(config: ModelConfig) -> ModelConfig:
    """Generation drops no token, and no step is run again because its buffers were too small."""
    return replace(config.for_any_routing(), capacity_factor=None)
