"""Prefill and the decode step, over a KV cache.

The keys and values of a row's token at position p are in column p, for any state of the other rows:
rows may be at different positions, and the results of a row do not depend on when it was admitted.
The cache has one buffer per layer, key and value, or one for all layers of a scanned stack
(`moe.layers.depth`), updated in place: a loop that carries it never copies it.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.attention.delta.sequences import DeltaCore, DeltaState, run_step
from moe.attention.delta.weights import DeltaNet
from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention
from moe.attention.mask import Window
from moe.attention.rotation import RotaryCache
from moe.cache.buffers import Cache, cache_of, to_cache_layout
from moe.cache.step import StepCore
from moe.config import ModelConfig
from moe.embedding import embed
from moe.head import logits_of
from moe.layers.block import block
from moe.layers.depth import depth_of, is_stack, runs_of
from moe.model import run_with_kv
from moe.precision import rms_norm
from moe.router.overflow import overflow_of
from moe.router.statistics import layers_in_order
from moe.tokens.packing import PackedBatch, pack_rows
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Layer, Transformer
from sharding.collectives import join_shards
from sharding.folding import FoldedMesh


class Prefilled(NamedTuple):
    """Result of a prefill.

    Attributes:
      cache: as long as the rows; the columns after each row's tokens are undefined.
      states: ``[row, d_model]`` the last hidden state of each row's last token, replicated over
        ``tp``.
      choices: ``[row, column, layer, k]`` expert ids of each token, `num_experts` after each row's
        tokens; None if they were not requested.
      overflow: ``[]`` number of expert ids on all devices that exceeded the buffers: unless it is
        0, the rows must be recomputed with buffers for any routing (`Execution.buffer_factor`).
        None if the buffers have that size.
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
    """Prefill: runs rows of tokens and returns their keys and values.

    Args:
      tokens: ids; those of a row start in its first column, and what follows them is not read.
      lengths: number of tokens of each row.
      record_choices: also return the expert ids of each token.

    Raises:
      ValueError: on a layout with ``cp``: a cache holds whole rows.
    """
    if mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: decoding does not support context parallelism, as a KV cache "
            "holds full rows: use cp=1."
        )
    config = for_prefill(config)
    packed = packed_prefill(tokens, lengths, config, mesh, record_choices)
    collect_kv = partial(to_cache_layout, tokens.shape)
    x, router, cached_kv = run_with_kv(collect_kv, weights, packed, config, mesh)
    expert_ids = None
    if record_choices:
        assert router is not None
        expert_ids = router.choices
        assert expert_ids is not None
    states, choices = by_row(x, expert_ids, packed, lengths, mesh)
    return Prefilled(cache_of(cached_kv), states, choices, overflow_of(router, config))


def for_prefill(config: ModelConfig) -> ModelConfig:
    """Configuration of a prefill: no backward pass follows, and no token is dropped."""
    execution = replace(config.execution, remat="none", fsdp=False, two_batch_overlap=False)
    return replace(config, execution=execution, capacity_factor=None)


def packed_prefill(
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool,
) -> PackedBatch:
    """Packed batch of the rows of a prefill."""
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
    """States and expert ids by row, as in `Prefilled`, from those of all tokens."""
    (of_rows,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states, choices = jnp.take_along_axis(of_rows, last, axis=1)[:, 0], None
    if chosen is not None:
        by_token = join_shards(jnp.moveaxis(chosen, 0, 1), mesh.sequence)
        (choices,) = packed.zigzag.restore(by_token)
    return states, choices


def for_step(config: ModelConfig) -> ModelConfig:
    """Configuration of a decode step: its few tokens are dispatched in one chunk."""
    execution = replace(config.execution, expert_chunks=1)
    # A step has few tokens, and cannot be recomputed after an overflow: buffers for any routing.
    config = replace(config, execution=execution, capacity_factor=None)
    return config.for_any_routing()


def packed_step(
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    core: CoreAttention | LatentCore | None = None,
    record_choices: bool = False,
    rope: RotaryCache | None = None,
) -> PackedBatch:
    """Packed batch of one token of each row; nothing is trained on it."""

    def core_attention_of_layer(
        index: int | Array, window: Window = None
    ) -> CoreAttention | LatentCore:
        assert core is not None
        return core

    return PackedBatch(
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        core_attention_of_layer=core_attention_of_layer,
        sequences=None,
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
        rope=rope,
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
    rope: RotaryCache | None = None,
) -> tuple[Float[Array, "local vocab"], Cache[Array], Int[Array, "row layer k"] | None]:
    """Decode step: appends one token to every live row and returns the logits of the next.

    Args:
      layers: the layers of `weights` in the parts of `moe.layers.depth.split_layer_groups`,
        unstacked once outside the loop.
      cache: written at `positions` of live rows, in place if the caller donates it; other rows stay
        unchanged.
      tokens: ids of the tokens to append.
      positions: position of each token in its row, from 0; less than the cache's columns.
      live: rows that are being decoded; results of the others are undefined.
      record_choices: also return the expert ids of each token.
      rope: rotary cos/sin tables of all positions, computed once outside the loop; None computes
        them for the tokens.

    Raises:
      ValueError: if `Execution.decode_attention` names a kernel that does not support the network.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the expert ids, `num_experts`
      for rows that are not live; None if they were not requested.
    """
    config = for_step(config)
    token_rope = None if rope is None else rope.gather(positions)
    packed = packed_step(tokens, positions, live, record_choices=record_choices, rope=token_rope)
    step = _Step(packed, positions, live, config, mesh)
    x, cached_kv, choices, first = embed(weights, tokens, config, mesh), [], [], 0
    # Latent vectors are keys and values at once.
    kv_buffers = zip(cache.keys, *[cache.values] * bool(cache.values), strict=True)
    delta_buffers = zip(cache.states, cache.tails, strict=True)
    for run in runs_of(layers, config):
        buffers = tuple(
            DeltaState(*next(delta_buffers)) if _is_delta(part) else next(kv_buffers)
            for part in run
        )
        x, buffers, expert_ids = _run_layer_group(step, first, run, x, buffers)
        first += depth_of(run)
        cached_kv += buffers
        if expert_ids is not None:
            choices.append(expert_ids)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    expert_ids = None
    if record_choices:
        expert_ids = join_shards(jnp.moveaxis(jnp.concatenate(choices), 0, 1), mesh.sequence)
    return logits_of(weights, x, config, mesh), cache_of(cached_kv), expert_ids


class _Step(NamedTuple):
    """Inputs of a decode step that all layers share."""

    packed: PackedBatch
    positions: Int[Array, "row"]
    live: Bool[Array, "row"]
    config: ModelConfig
    mesh: FoldedMesh


Buffers = DeltaState | tuple[Array, ...]
"""Buffers of a part of the layers: keys and, unless these are latent vectors, values; or the states
of Gated DeltaNet."""


def _is_delta(part: Layer[Array]) -> bool:
    return isinstance(part.attention, DeltaNet)


def _run_layer_group(
    step: _Step,
    first: int,
    run: tuple[Layer[Array], ...],
    x: Array,
    buffers: tuple[Buffers, ...],
) -> tuple[Array, tuple[Buffers, ...], Array | None]:
    """Runs one run of `moe.layers.depth.runs_of`: a layer, or a scanned stack.

    Args:
      first: index of its first layer.
      buffers: buffers of each part.

    Returns:
      The hidden states; the buffers; expert ids ``[layer, local, k]``, None if they were not
      requested or the layers have no experts.
    """
    if not is_stack(run[0]):
        x, layer_buffers, chosen = _run_layer(step, first, run[0], x, buffers[0], ())
        return x, (layer_buffers,), None if chosen is None else chosen[None]

    def after_period(
        carry: tuple[Array, tuple[Buffers, ...]], inputs: tuple[Array, tuple[Layer[Array], ...]]
    ) -> tuple[tuple[Array, tuple[Buffers, ...]], list[Array | None]]:
        (x, stored), (period, layers) = carry, inputs
        updated, choices = list[Buffers](), list[Array | None]()
        for index, layer in enumerate(layers):
            layer_index = first + period * len(run) + index
            x, layer_buffers, chosen = _run_layer(
                step, layer_index, layer, x, stored[index], (period,)
            )
            updated.append(layer_buffers)
            choices.append(chosen)
        return (x, tuple(updated)), choices

    # The buffers are in the carry, and a layer writes its part of them. As inputs and outputs per
    # iteration they would be copied completely.
    periods = jnp.arange(run[0].norm.shape[0])
    (x, buffers), choices = lax.scan(after_period, (x, buffers), (periods, run))
    expert_ids = [chosen for chosen in choices if chosen is not None]
    return x, buffers, layers_in_order(*expert_ids) if expert_ids else None


def _run_layer(
    step: _Step,
    layer_index: int | Array,
    layer: Layer[Array],
    x: Array,
    before: Buffers,
    stack_index: tuple[Array, ...],
) -> tuple[Array, Buffers, Array | None]:
    """Runs a layer: the hidden states, its buffers after it, and its expert ids.

    Args:
      stack_index: index of the layer in buffers with layers in front.
    """
    if isinstance(before, DeltaState):
        assert step.config.delta is not None
        # Rows that are not live stay as they are.
        state = DeltaState(*(_index_layer(x, stack_index) for x in before))
        new_states = list[DeltaState]()
        run_delta = partial(run_step, step.config.delta, state, step.live)
        core = DeltaCore(run_delta).record_states(new_states.append)
        x, router = block(layer, x, step.packed, core, step.config, step.mesh, layer_index)
        updated: Buffers = DeltaState(
            *(
                _update_layer(x, new, stack_index)
                for x, new in zip(before, *new_states, strict=True)
            )
        )
    else:
        keys, values = before[0], before[1] if len(before) > 1 else None
        core = StepCore(
            step.config, layer_index, keys, values, step.positions, step.live, stack_index
        )
        x, router = block(layer, x, step.packed, core.attend, step.config, step.mesh, layer_index)
        updated = tuple(buffer for buffer in (core.keys, core.values) if buffer is not None)
    return x, updated, None if router is None else router.choices


def _index_layer(buffer: Array, stack_index: tuple[Array, ...]) -> Array:
    return lax.dynamic_index_in_dim(buffer, *stack_index, keepdims=False) if stack_index else buffer


def _update_layer(buffer: Array, new: Array, stack_index: tuple[Array, ...]) -> Array:
    return (
        lax.dynamic_update_index_in_dim(buffer, new, *stack_index, axis=0) if stack_index else new
    )
