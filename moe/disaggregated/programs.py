"""Compiled programs of both sides. Each is compiled once for all layers: weights and layer index
are arguments."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moe.attention.latent import LatentCore, caches_latent
from moe.attention.layer import CoreAttention, window_of_layer
from moe.cache import StepCore, StepTokens, to_cache_layout
from moe.decoding import packed_step
from moe.disaggregated.layer import (
    Serving,
    TokenState,
    attend_and_route,
    combine_outputs,
    compute_experts,
    initial_state,
    state_specs,
)
from moe.disaggregated.weights import (
    AttentionHalf,
    attention_specs,
    expert_specs,
    first_specs,
    rest_specs,
)
from moe.head import logits_of
from moe.layers.block import block
from moe.model import by_row, embed, last_norm, packed_prefill, record_kv
from moe.tokens.packing import PackedBatch
from moe.weights import Experts, Layer, Transformer
from sharding.collectives import join_shards, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit

Arrays = tuple[Array, ...]


class Steps(NamedTuple):
    """Inputs of a decode step: one token of each row of a micro-batch.

    Attributes:
      step: the tokens.
      first: ``[]`` index of the micro-batch's first row in the cache of a device.
    """

    step: StepTokens
    first: Array


class Prompts(NamedTuple):
    """Inputs of a prefill: whole rows of tokens.

    Attributes:
      tokens: ``[row, column]`` ids, each row's from its first column on.
      lengths: ``[row]`` number of tokens of each.
    """

    tokens: Array
    lengths: Array


Inputs = Steps | Prompts


class Buffers(NamedTuple):
    """Keys and values of a layer: of a cache, or of the tokens of prompts; values are None with
    latent vectors. Both are None before a prefill."""

    keys: Array | None
    values: Array | None


_on_attention = partial(MeshJit, mesh_of=lambda serving: serving.mesh.attention, overlap=False)
"""Compiled functions on the attention devices, of one half of a layer: the other half is elsewhere,
so that communication has nothing to overlap with."""


@partial(_on_attention, static_argnums=0)
def begin(serving: Serving, rest: Transformer[Array], inputs: Inputs) -> TokenState[Array]:
    """Embeds the tokens: returns their state before the first layer."""
    mesh = serving.mesh.attention

    def local(rest: Transformer[Array], inputs: Inputs) -> TokenState[Array]:
        tokens = _packed(serving, inputs, None).tokens
        return initial_state(serving, embed(vary(rest, mesh.axes), tokens, serving.attention_model))

    in_specs = rest_specs(serving.attention_model), _input_specs(serving, inputs)
    return _shard_map_varying(mesh, local, in_specs, state_specs(serving))(rest, inputs)


@partial(_on_attention, static_argnums=(0, 1), donate_argnums=(4, 5))
def dense_layer(
    serving: Serving,
    num_positions: int | None,
    layer: Layer[Array],
    layer_index: Array,
    buffers: Buffers,
    state: TokenState[Array],
    inputs: Inputs,
) -> tuple[TokenState[Array], Buffers]:
    """Runs a dense layer: attention and feed-forward. Arguments are as of `attention_half`; returns
    the state and the buffers after the layer."""
    mesh, model = serving.mesh.attention, serving.attention_model

    def local(layer: Any, layer_index: Array, buffers: Buffers, state: Any, inputs: Inputs) -> Any:
        core = _Core(serving, layer_index, vary(buffers, mesh.axes), inputs, num_positions)
        x, _ = block(vary(layer, mesh.axes), state.x, core.packed, core.attend, model, layer_index)
        return state.replace(x=x), core.updated_buffers

    in_specs = first_specs(model), *_attention_specs(serving, buffers, inputs)
    out_specs = state_specs(serving), _buffer_specs(serving)
    return _shard_map_varying(mesh, local, in_specs, out_specs)(
        layer, layer_index, buffers, state, inputs
    )


@partial(_on_attention, static_argnums=(0, 1), donate_argnums=(4, 5))
def attention_half(
    serving: Serving,
    num_positions: int | None,
    half: AttentionHalf[Array],
    layer_index: Array,
    buffers: Buffers,
    state: TokenState[Array],
    inputs: Inputs,
    received: Arrays,
) -> tuple[TokenState[Array], Buffers, Arrays]:
    """Runs the attention half of a layer: combine of the layer before, norm, projections, cache,
    core attention, output projection, router, and the rows for each expert device.

    Args:
      num_positions: number of positions of the cache that are read; None is all.
      layer_index: index of the layer in the network.
      buffers: donated; None before a prefill.
      state: donated.
      received: for each expert device the sums that it returned for the layer before, ``[rows,
        d_model]`` (`Serving.message_back`) on each attention device; zeros in the first layer with
        experts.

    Returns:
      The state, the buffers after the layer, and for each expert device the messages to it,
      ``[rows, width]`` (`Serving.message_out`) on each attention device.
    """
    mesh, config = serving.mesh.attention, serving.config

    def local(
        half: Any,
        layer_index: Array,
        buffers: Buffers,
        state: Any,
        inputs: Inputs,
        received: Arrays,
    ) -> Any:
        core = _Core(serving, layer_index, vary(buffers, mesh.axes), inputs, num_positions)
        x, expert_layer = combine_outputs(state, received), layer_index - config.num_dense_layers
        state, sent = attend_and_route(
            serving,
            vary(half.layer, mesh.axes),
            expert_layer,
            x,
            core.packed,
            core.attend,
            vary(half.slot_table, mesh.axes),
            state.choices,
        )
        return state, core.updated_buffers, sent

    rows = (PartitionSpec(mesh.axes),) * serving.num_targets
    replicated: Any = PartitionSpec()
    half_specs = AttentionHalf(attention_specs(serving.attention_model), replicated)
    in_specs = half_specs, *_attention_specs(serving, buffers, inputs), rows
    out_specs = state_specs(serving), _buffer_specs(serving), rows
    return _shard_map_varying(mesh, local, in_specs, out_specs)(
        half, layer_index, buffers, state, inputs, received
    )


@partial(MeshJit, mesh_of=lambda serving: serving.mesh.experts, overlap=False, static_argnums=0)
def experts_half(serving: Serving, experts: Experts[Array], received: Arrays) -> Arrays:
    """Runs the expert half of a layer: its grouped GEMMs on the received rows, with gate weights.

    Args:
      experts: routed experts of the layer, by slot.
      received: for each attention device the messages from it, ``[rows, width]``
        (`Serving.message_out`) on each expert device.

    Returns:
      For each attention device the sums of its rows, ``[rows, d_model]`` (`Serving.message_back`)
      on each expert device.
    """
    mesh = serving.mesh.experts
    rows = (PartitionSpec(mesh.axes),) * serving.num_sources

    def local(experts: Experts[Array], received: Arrays) -> Arrays:
        return compute_experts(serving, *vary((experts, received), mesh.axes))

    in_specs = expert_specs(mesh), rows
    return jax.shard_map(local, mesh=mesh.mesh, in_specs=in_specs, out_specs=rows)(
        experts, received
    )


@partial(_on_attention, static_argnums=0)
def end_step(
    serving: Serving, rest: Transformer[Array], state: TokenState[Array], received: Arrays
) -> tuple[Array, Array | None]:
    """Logits of the next token, after the last layer of a decode step.

    Args:
      rest: embedding, last norm and head.
      received: sums of the last layer, as of `attention_half`.

    Returns:
      Logits ``[row, vocab]``, float32, sharded over all attention devices, and the expert ids
      ``[row, layer, k]`` of the tokens that were run, sharded over ``dp``; None if they are not
      recorded.
    """
    mesh, config = serving.mesh.attention, serving.config

    def local(rest: Any, state: Any, received: Arrays) -> Any:
        rest = vary(rest, mesh.axes)
        x = last_norm(rest, combine_outputs(state, received), config)
        expert_ids = None
        if state.choices is not None:
            expert_ids = join_shards(jnp.moveaxis(state.choices, 0, 1), mesh.sequence)
        return logits_of(rest, x, serving.attention_model), expert_ids

    token_spec = PartitionSpec(mesh.axes)
    choices_spec = PartitionSpec(mesh.except_sequence) if serving.records_choices else None
    in_specs = (
        rest_specs(serving.attention_model),
        state_specs(serving),
        (token_spec,) * serving.num_targets,
    )
    out_specs = token_spec, choices_spec
    return jax.shard_map(local, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs)(
        rest, state, received
    )


@partial(_on_attention, static_argnums=0)
def end_prefill(
    serving: Serving,
    rest: Transformer[Array],
    state: TokenState[Array],
    received: Arrays,
    inputs: Prompts,
) -> tuple[Array, Array | None]:
    """States ``[row, d_model]`` and expert ids ``[row, column, layer, k]`` after a prefill, as in
    `moe.model.Prefilled`, both sharded over ``dp``."""
    mesh, config = serving.mesh.attention, serving.config

    def local(rest: Any, state: Any, received: Arrays, inputs: Prompts) -> Any:
        x = last_norm(vary(rest, mesh.axes), combine_outputs(state, received), config)
        return by_row(x, state.choices, _packed(serving, inputs, None), inputs.lengths, mesh)

    token_spec, rows = PartitionSpec(mesh.axes), PartitionSpec(mesh.except_sequence)
    in_specs = (
        rest_specs(serving.attention_model),
        state_specs(serving),
        (token_spec,) * serving.num_targets,
        _input_specs(serving, inputs),
    )
    out_specs = rows, rows if serving.records_choices else None
    return jax.shard_map(local, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs)(
        rest, state, received, inputs
    )


class _Core:
    """Core attention of a layer (`attend`) on a packed batch, of a decode step or of a prefill."""

    def __init__(
        self,
        serving: Serving,
        layer_index: Array,
        buffers: Buffers,
        inputs: Inputs,
        num_positions: int | None,
    ):
        config, self._step, self._recorded = serving.config, None, list[Arrays]()
        if isinstance(inputs, Steps):
            present = tuple(buffer for buffer in buffers if buffer is not None)
            rows = inputs.step.tokens.shape[0]
            self._step = StepCore(
                serving.attention_model,
                layer_index,
                present,
                inputs.step,
                first=None if present[0].shape[0] == rows else inputs.first,
                num_positions=num_positions,
            )
            self.attend: CoreAttention | LatentCore = self._step.attend
            self.packed = _packed(serving, inputs, self.attend)
            return
        self.packed = _packed(serving, inputs, None)
        core = self.packed.core_attention_of_layer(
            layer_index, window_of_layer(config, layer_index)
        )
        assert not isinstance(core, LatentCore)
        keep = partial(to_cache_layout, inputs.tokens.shape)
        self.attend = record_kv(core, keep, self._recorded, config)

    @property
    def updated_buffers(self) -> Buffers:
        """Keys and values of the layer after it has run."""
        keys, *values = self._recorded[0] if self._step is None else self._step.buffers
        return Buffers(keys, values[0] if values else None)


def _packed(
    serving: Serving, inputs: Inputs, core: CoreAttention | LatentCore | None
) -> PackedBatch:
    records = serving.records_choices
    if isinstance(inputs, Steps):
        return packed_step(inputs.step, core, records)
    return packed_prefill(*inputs, serving.attention_model, records)


def _input_specs(serving: Serving, inputs: Inputs) -> Any:
    rows: Any = PartitionSpec(serving.mesh.attention.except_sequence)
    replicated: Any = PartitionSpec()
    if isinstance(inputs, Steps):
        return Steps(StepTokens(rows, rows, rows), replicated)
    return Prompts(rows, rows)


def _buffer_specs(serving: Serving) -> Any:
    mesh = serving.mesh.attention
    heads: Any = PartitionSpec(mesh.except_sequence, mesh.sequence)
    return Buffers(heads, None if caches_latent(serving.config) else heads)


def _attention_specs(serving: Serving, buffers: Buffers, inputs: Inputs) -> tuple[Any, ...]:
    """PartitionSpecs of the layer index, buffers, state and inputs."""
    buffers_spec = Buffers(None, None) if buffers.keys is None else _buffer_specs(serving)
    return PartitionSpec(), buffers_spec, state_specs(serving), _input_specs(serving, inputs)


def _shard_map_varying(mesh: FoldedMesh, local: Any, in_specs: Any, out_specs: Any) -> Any:
    """`jax.shard_map` of a function whose results differ between all devices."""

    def local_varying(*args: Any) -> Any:
        return vary(local(*args), mesh.axes)

    return jax.shard_map(local_varying, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs)
