"""Forward pass of the network, of training and of prefill: functions over the weight records,
inside one `jax.shard_map`.

Sequences are sharded over ``dp``; within a sequence-parallel group the flattened tokens are sharded
over ``cp`` and ``tp`` (`FoldedMesh.sequence`), in the order of a `PackedBatch`. Training and
decoding use the same block and differ in `core_attention`.

The rows of the token embedding, one per token of the vocabulary, are sharded over ``tp`` if it
divides them (vocab-parallel, in Megatron's words); otherwise every rank has all of them and looks
up its own tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from moe.architecture.attention import delta_layers
from moe.attention.delta import DeltaCore, delta_core
from moe.attention.latent import LatentCore, caches_latent, expand_latent
from moe.attention.layer import CoreAttention, window_of_layer
from moe.cache import Cache, cache_of, to_cache_layout
from moe.config import Model, ModelConfig
from moe.head import logits_of, value_of
from moe.layers.block import block
from moe.layers.depth import (
    is_scanned,
    num_layers,
    period_of_stack,
    run_layers,
    split_groups,
)
from moe.layers.two_batch_overlap import (
    Streams,
    join_streams,
    restore_choices_order,
    restore_row_order,
    run_streams,
    split_streams,
)
from moe.layers.wrappers import RunLayer, with_fsdp, with_remat
from moe.ops.mask import Window
from moe.ops.precision import rms_norm
from moe.router.statistics import RouterStatistics, overflow_of, sums_over_layers
from moe.tokens.packing import PackedBatch, align_to_tokens, pack_rows
from moe.weights import Layer, Transformer
from sharding.collectives import (
    join_shards,
    local_shard,
    match_varying,
    scatter_tokens,
    vary,
)
from sharding.folding import FoldedMesh
from sharding.zero import ShardDim

Tokens = Int[Array, "batch time"]
Valid = Bool[Array, "batch time"]
Choices = Integer[Array, "layer batch time k"]
KVCollector = Callable[..., Any]
"""(keys and values of a layer's tokens, or latent vectors) -> cached arrays. It is not called for a
layer with Gated DeltaNet, whose result is its `DeltaState`."""


def embed(
    weights: Transformer[Array], tokens: Int[Array, "token"], model: Model
) -> Float[Array, "local d_model"]:
    """Embeds tokens: the residual stream of this rank's shard of the flattened tokens.

    With sharded rows each ``tp`` rank finds some of the tokens of its ``cp`` rank and gives zeros
    for the others; the sum over ranks is one number and zeros, which is exact.

    Communication per device if the rows are sharded: one `scatter_tokens` over ``tp``, backward one
    `gather_tokens`, of ``tokens x d_model (tp - 1) / tp`` elements each, for the tokens of a ``cp``
    rank. Otherwise none.

    Args:
      tokens: all ids of the sequence-parallel group, on each of its devices.

    References:
      Shoeybi et al., "Megatron-LM", 2019, section 3 (the input embedding, parallel over the
      vocabulary). https://arxiv.org/abs/1909.08053
    """
    # The table starts with variance 1 / d_model, right for a tied head; the residual stream
    # starts with 1.
    config, mesh = model.config, model.mesh
    scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
    num_rows = weights.embedding.shape[0]
    if num_rows == config.vocab_size:
        tokens = vary(local_shard(tokens, mesh.sequence), mesh.axes)
        return (lookup(weights.embedding, tokens) * scale).astype(config.dtype)
    tokens = vary(local_shard(tokens, mesh.cp), mesh.axes)
    row = tokens - lax.axis_index(mesh.tp).astype(tokens.dtype) * num_rows
    # Past the end the lookup gives zeros and no gradient; a negative index would count from the
    # end.
    row = jnp.where(row < 0, num_rows, row)
    rows = lookup(weights.embedding, row)
    return scatter_tokens((rows * scale).astype(config.dtype), mesh.tp)


def lookup(
    table: Float[Array, "vocab d_model"], tokens: Int[Array, "token"]
) -> Float[Array, "token d_model"]:
    """Looks up ``table[tokens]``, float32; zeros, with no gradient, for ids past the end.

    The gradient of a row is the sum over the tokens with its id, in float32 and rounded to the
    dtype of the table once: for a frequent token a sum in bfloat16 would stop growing.
    """
    table, tokens = match_varying((table, tokens))
    return _lookup(table, tokens, table.shape, table.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _lookup_forward(table, tokens, shape, dtype)[0]


def _lookup_forward(
    table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any
) -> tuple[Array, Array]:
    rows = table.at[tokens].get(mode="fill", fill_value=0)
    return rows.astype(jnp.float32), tokens


def _lookup_backward(
    shape: tuple[int, ...], dtype: Any, tokens: Array, gradient: Array
) -> tuple[Array, None]:
    zeros = match_varying(jnp.zeros(shape, jnp.float32), gradient)
    return zeros.at[tokens].add(gradient, mode="drop").astype(dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


class LayerSpan(NamedTuple):
    """Consecutive layers of the network that a stack has; both numbers are arrays if they are known
    only at run time, as in a pipeline stage.

    Attributes:
      first: index of the first layer.
      present: number of layers that run, all or all but the last, which is padding then; None is
        all.
    """

    first: int | Int[Array, ""] = 0
    present: Int[Array, ""] | None = None


def run(
    weights: Transformer[Array],
    packed: PackedBatch,
    model: Model,
    shard_dims: Layer[ShardDim] | None = None,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """Runs the network up to its last norm, on this rank's shard of the tokens.

    All layers are on this device; `moe.stages` runs the layers of a pipeline.

    Args:
      shard_dims: sharded dimensions of the layers' weights, as in `blocks`.

    Returns:
      The hidden states after the last norm, in the order of the rows, and the router statistics of
      this device's tokens summed over layers, with `load` ``[layer, route]`` of the layers that
      have experts; None if no layer has.
    """
    x, stats, _ = run_with_kv(None, weights, packed, model, shard_dims)
    return x, stats


def run_with_kv(
    collect_kv: KVCollector | None,
    weights: Transformer[Array],
    packed: PackedBatch,
    model: Model,
    shard_dims: Layer[ShardDim] | None = None,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None, list[Any]]:
    """`run`, which also returns the results of `collect_kv`: one for each group of
    `moe.layers.depth.split_layer_groups`."""
    mesh = model.mesh
    _check_single_stage(mesh)
    check_num_tokens(packed.tokens.shape[0], mesh)
    x = embed(weights, packed.tokens, model)
    x, first_cached_kv = first_blocks(weights, x, packed, model, collect_kv)
    span = LayerSpan(model.config.num_dense_layers)
    x, stats, cached_kv = blocks(weights.layers, x, packed, model, span, shard_dims, collect_kv)
    return (
        last_norm(weights, restore_row_order(x, packed, mesh), model.config),
        stats,
        first_cached_kv + cached_kv,
    )


def first_blocks(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    packed: PackedBatch,
    model: Model,
    collect_kv: KVCollector | None = None,
) -> tuple[Float[Array, "local d_model"], list[Any]]:
    """Runs the leading dense layers that some networks have: the residual stream after them, and
    the results of `collect_kv`."""
    if weights.first_layers is None:
        return x, []
    x, _, cached_kv = blocks(weights.first_layers, x, packed, model, collect_kv=collect_kv)
    return x, cached_kv


def blocks(
    layers: Layer[Array],
    x: Float[Array, "local d_model"],
    packed: PackedBatch,
    model: Model,
    span: LayerSpan = LayerSpan(),  # noqa: B008, of no mutable value
    shard_dims: Layer[ShardDim] | None = None,
    collect_kv: KVCollector | None = None,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None, list[Any]]:
    """Runs a stack of consecutive layers on this rank's shard of the residual stream.

    Args:
      layers: stacked weights, each leaf ``[layer, ...]`` or a `sharding.zero.Reduced` of one.
        Layers may differ in their windows, and in having attention or Gated DeltaNet.
      x: the residual stream; with `packed.half_batches` in their order, as is the result.
      span: which layers of the network they are. Layers with Gated DeltaNet are counted from the
        start of the stack.
      shard_dims: with FSDP the sharded dimension of each weight; a layer is unsharded when it runs.
        None if weights are not sharded.
      collect_kv: called with the keys and values, or latent vectors, of each layer; None collects
        nothing. Not with `packed.half_batches`.

    Returns:
      The residual stream; the router statistics of this device's tokens summed over layers, with
      `load` ``[layer, route]`` and, if recorded, `choices` ``[layer, local, k]`` in the order of
      the rows, None without experts; and a list of the results of `collect_kv`, one per layer or,
      if the stack is scanned, per layer of a period, with a dimension of periods in front.
    """
    config = model.config
    depth, (first, present) = num_layers(layers), span
    # In a pipeline all chunks are alike in them (`moe.placement.check_delta_layers`).
    of_delta = tuple(layer for layer in delta_layers(config) if layer < depth)
    period = period_of_stack(config, depth, first if isinstance(first, int) else None)
    scanned = is_scanned(depth, config.execution, period)

    def run_numbered(index: int | Int[Array, ""], like: int, layer: Layer[Array], streams: Streams):
        layer_index = first + index
        # Choices are recorded for the layers that have experts.
        half_batches = [
            half.for_layer(layer_index - config.num_dense_layers) for half in packed.streams
        ]
        window = window_of_period(config, layer_index, first, range(like, depth, period))
        cores = [
            delta_core(half.mask, config)
            if like in of_delta
            else half.core_attention_of_layer(layer_index, window)
            for half in half_batches
        ]
        run_layer = with_half_batches(block, half_batches, cores, collect_kv, model, layer_index)
        run_layer = with_fsdp(run_layer, shard_dims)
        # Layers are padded at the end of a stack: all of a scan are alike.
        may_be_absent = present is not None and (scanned or index == depth - 1)
        is_present = index < present if may_be_absent and present is not None else None
        # A scan keeps its iterations apart by itself, but not the layers of one iteration.
        run_layer = with_remat(run_layer, config, is_present, in_scan=scanned and period == 1)
        return run_layer(layer, streams)

    streams = split_streams(x, packed, model.mesh)
    streams, outs = run_layers(run_numbered, layers, streams, config.execution, period, of_delta)
    collected, cached_kv = ([out[entry] for out in outs] for entry in range(2))
    stats = restore_choices_order(sums_over_layers(collected, scanned), packed, model.mesh)
    return join_streams(streams), stats, cached_kv


def window_of_period(
    config: ModelConfig, layer_index: int | Int[Array, ""], first: int | Array, indices: range
) -> Window:
    """Window of a layer; `indices` are the layers of the stack at its offset in their periods."""
    if isinstance(first, int):
        windows = [window_of_layer(config, first + index) for index in indices]
        if all(window == windows[0] for window in windows):
            # Kernels take a window that is known at compile time.
            return windows[0]
    return window_of_layer(config, layer_index)


def with_half_batches(
    run_block: Callable[..., tuple[Array, RouterStatistics[Array] | None]],
    half_batches: Sequence[PackedBatch],
    cores: Sequence[CoreAttention | LatentCore | DeltaCore],
    collect_kv: KVCollector | None,
    model: Model,
    layer_index: int | Int[Array, ""],
) -> RunLayer:
    """Runs a block on the whole batch, or on two half-batches that overlap."""

    def run_layer(layer: Layer[Array], streams: Streams):
        cached_kv: list[Any] = []

        def run_half(half: int, layer: Layer[Array], x: Array):
            core = cores[half]
            if collect_kv is not None:
                assert not isinstance(core, LatentCore) and len(cores) == 1
                if isinstance(core, DeltaCore):
                    core = core.record_states(cached_kv.append)
                else:
                    core = record_kv(core, collect_kv, cached_kv, model.config)
            return run_block(layer, x, half_batches[half], core, model, layer_index)

        streams, stats = run_streams(run_half, layer, streams, model)
        return streams, (stats, cached_kv[0] if cached_kv else None)

    return run_layer


def record_kv(
    core_attention: CoreAttention,
    collect_kv: KVCollector,
    cached_kv: list[Any],
    config: ModelConfig,
) -> CoreAttention | LatentCore:
    """Wraps core attention to record the layer's keys and values: appends the result of
    `collect_kv` to `cached_kv`."""

    def attend_heads(
        query: Array,
        key: Array,
        value: Array,
        scale: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        cached_kv.append(collect_kv(key, value))
        return core_attention(query, key, value, scale, sinks)

    def attend_latent(query: Array, narrow: Array, up: Array) -> Array:
        cached_kv.append(collect_kv(narrow[:, None]))
        return core_attention(query, *expand_latent(narrow, up, config))

    return LatentCore(attend_latent) if caches_latent(config) else attend_heads


def last_norm(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local d_model"]:
    """Last norm of the network: the hidden states that the heads take."""
    return rms_norm(x, weights.norm, config.norm_epsilon)


def hidden(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    model: Model,
    replay: Choices | None = None,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """`run` on the rows of this ``dp`` rank.

    Args:
      tokens: ids.
      valid: which of them are not padding.
      replay: expert ids from `routing_choices`, used instead of the router's selection, with the
        current scores; a token with an id out of range is routed.
    """
    return run(weights, pack_rows(tokens, valid, model, replay), model)


def routing_choices(
    weights: Transformer[Array], tokens: Tokens, valid: Valid, model: Model
) -> Choices:
    """Expert ids that the router selects for each token in each layer, before dropping, as `replay`
    takes them.

    Padding has the id `num_experts`.

    Raises:
      ValueError: for a network without experts, and as `run`.
    """
    if model.config.num_experts == 0:
        raise ValueError("num_experts=0 has no router, so there are no expert ids to return.")
    model = replace(model, config=model.config.for_any_routing())
    packed = pack_rows(tokens, valid, model)
    _, stats = run(weights, packed._replace(record_choices=True), model)
    assert stats is not None
    assert stats.choices is not None
    return jnp.moveaxis(_choices_by_row(stats.choices, packed, model.mesh), 2, 0)


def next_token_logits(
    weights: Transformer[Array], tokens: Tokens, valid: Valid, model: Model
) -> tuple[Float[Array, "local vocab"], RouterStatistics[Array] | None]:
    """Logits of the token after each position, this rank's shard of the flattened positions."""
    x, stats = hidden(weights, tokens, valid, model)
    return logits_of(weights, x, model), stats


def values(
    weights: Transformer[Array], tokens: Tokens, valid: Valid, model: Model
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """Critic values aligned to tokens: column t has the value of the state before token t, computed
    at column t - 1; column 0 is 0.

    A value computed at padding, for example for the first token after left padding, has no meaning.

    Returns:
      The values of the rows of this ``dp`` rank, float32, equal on all ranks of ``cp`` and ``tp``;
      and the router statistics, as of `run`.

    Raises:
      ValueError: the network is no critic, the layout has ``pp``, or ``cp x tp`` does not divide
        the number of tokens.
    """
    x, stats = hidden(weights, tokens, valid, model)
    return align_to_tokens(value_of(weights, x, model.config), tokens.shape, model), stats


class Prefilled(NamedTuple):
    """Result of a prefill.

    Attributes:
      cache: as long as the rows; the columns after each row's tokens are undefined.
      states: ``[row, d_model]`` the hidden state of each row's last token after the last norm, as
        `moe.head.logits_of` takes it, but replicated over ``tp``.
      choices: ``[row, column, layer, k]`` expert ids of each token, `num_experts` after each row's
        tokens; None if they were not requested.
      overflow: ``[]`` number of expert ids on all devices that exceeded the buffers: unless it is
        0, the rows must be recomputed with buffers for any routing (`Execution.buffer_factor`).
        None if the buffers are large enough for any routing, or without experts.
    """

    cache: Cache[Array]
    states: Array
    choices: Array | None
    overflow: Array | None = None


def prefill(
    weights: Transformer[Array],
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    model: Model,
    record_choices: bool = False,
    groups: ModelConfig | None = None,
) -> Prefilled:
    """Prefill: runs rows of tokens and returns their keys and values.

    Args:
      tokens: ids; a row starts in its first column, and what follows its tokens is not read.
      record_choices: also return the expert ids of each token.
      groups: configuration of the layer groups of the cache (`moe.decoding.step_config`); None has
        the groups of the prefill.

    Raises:
      ValueError: on a layout with ``cp``, as a cache holds whole rows, or with ``pp``; or if ``tp``
        does not divide the number of tokens, rows times columns.
    """
    if (layout := model.mesh.layout).cp > 1:
        raise ValueError(
            f"layout {layout}: decoding does not support context parallelism, as a KV cache "
            "holds full rows: use cp=1."
        )
    model = replace(model, config=for_prefill(model.config))
    packed = packed_prefill(tokens, lengths, model, record_choices)
    collect_kv = partial(to_cache_layout, tokens.shape)
    x, router, cached_kv = run_with_kv(collect_kv, weights, packed, model)
    expert_ids = None if router is None else router.choices
    states, choices = by_row(x, expert_ids, packed, lengths, model.mesh)
    cache = cache_of(split_groups(cached_kv, model.config, groups or model.config))
    return Prefilled(cache, states, choices, overflow_of(router, model.config))


def for_prefill(config: ModelConfig) -> ModelConfig:
    """Configuration of a prefill: no remat, no capacity that drops tokens, full weights (no FSDP),
    rows in their order (no two-batch overlap)."""
    execution = replace(config.execution, remat="none", fsdp=False, two_batch_overlap=False)
    return replace(config, execution=execution, capacity_factor=None)


def packed_prefill(
    tokens: Int[Array, "row column"], lengths: Int[Array, "row"], model: Model, record_choices: bool
) -> PackedBatch:
    """Packed batch of the rows of a prefill: rows times columns tokens, row after row, equal on
    every ``tp`` rank.

    Args:
      tokens, lengths, record_choices: as for `prefill`.
      model: its config is as `for_prefill` returns it.
    """
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    packed = pack_rows(tokens, valid, model)
    return packed._replace(record_choices=record_choices)


def by_row(
    x: Float[Array, "local d_model"],
    expert_ids: Int[Array, "layer local k"] | None,
    packed: PackedBatch,
    lengths: Int[Array, "row"],
    mesh: FoldedMesh,
) -> tuple[Array, Array | None]:
    """States and expert ids by row, as in `Prefilled`, from the states and ids of all tokens.

    Args:
      x: hidden states after the last norm, this rank's shard.
      expert_ids: of the layers with experts, before dropping; None if they were not recorded.
    """
    (states_of_rows,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states = jnp.take_along_axis(states_of_rows, last, axis=1)[:, 0]
    return states, None if expert_ids is None else _choices_by_row(expert_ids, packed, mesh)


def _choices_by_row(
    expert_ids: Int[Array, "layer local k"], packed: PackedBatch, mesh: FoldedMesh
) -> Integer[Array, "row column layer k"]:
    # Undoes the zig-zag order: tokens in front, so that shards are concatenated.
    by_token = join_shards(jnp.moveaxis(expert_ids, 0, 1), mesh.sequence)
    (choices,) = packed.zigzag.restore(by_token)
    return choices


def check_num_tokens(num_tokens: int, mesh: FoldedMesh) -> None:
    """Checks that the devices of a sequence-parallel group divide the number of tokens.

    Raises:
      ValueError: if they do not.
    """
    if num_tokens % mesh.size(mesh.sequence):
        raise ValueError(
            f"{num_tokens} tokens per data-parallel rank cannot be split over cp x tp = "
            f"{mesh.size(mesh.cp)} x {mesh.size(mesh.tp)}: choose a batch or a length that divides."
        )


def _check_single_stage(mesh: FoldedMesh) -> None:
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} splits the layers into pipeline stages, but this call needs "
            "all of them on each device: use a layout with pp=1. Only scoring and training "
            "support pp."
        )
