"""Compiled programs of both sides: each kind is compiled once for all layers, which differ in their
arguments alone."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moe.attention.latent import LatentCore, caches_latent
from moe.attention.layer import CoreAttention
from moe.attention.mask import window_of_layer
from moe.cache.buffers import to_cache_layout
from moe.cache.step import StepCore
from moe.decoding import by_row, packed_prefill, packed_step
from moe.disaggregated.layer import (
    Flight,
    Serving,
    attend_and_route,
    combine_outputs,
    compute_experts,
    flight_specs,
    initial_flight,
)
from moe.disaggregated.placement import SlotTable
from moe.disaggregated.weights import attention_specs, expert_specs, first_specs, rest_specs
from moe.embedding import embed
from moe.head import logits_of
from moe.layers.block import block
from moe.model import last_norm, record_kv
from moe.tokens.packing import PackedBatch
from moe.weights import Experts, Layer, Transformer
from sharding.collectives import join_shards, vary

Arrays = tuple[Array, ...]


class Steps(NamedTuple):
    """Inputs of a decode step: one token of each row of a micro-batch.

    Attributes:
      tokens: ``[row]`` ids.
      positions: ``[row]`` position of the token in its row, from 0.
      live: ``[row]`` true for rows that are being decoded; results of the others are undefined.
      first: ``[]`` index of the micro-batch's first row in the cache of a device.
    """

    tokens: Array
    positions: Array
    live: Array
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
    latent vectors."""

    keys: Array | None
    values: Array | None


@partial(jax.jit, static_argnums=0)
def begin(serving: Serving, rest: Transformer[Array], inputs: Inputs) -> Flight[Array]:
    """Embeds the tokens: the state at the start of the network."""
    mesh = serving.mesh.attention

    def local(rest: Transformer[Array], inputs: Inputs) -> Flight[Array]:
        tokens = _packed(serving, inputs, None).tokens
        return initial_flight(serving, embed(vary(rest, mesh.axes), tokens, serving.config, mesh))

    return _shard_map_attention(
        serving, local, (rest_specs(serving.config, mesh), _input_specs(serving, inputs))
    )(rest, inputs)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def dense_layer(
    serving: Serving,
    columns: int | None,
    layer: Layer[Array],
    layer_index: Array,
    buffers: Buffers,
    flight: Flight[Array],
    inputs: Inputs,
) -> tuple[Flight[Array], Buffers]:
    """Runs a whole layer without experts.

    Args:
      columns: number of columns of the cache that are read; None is all.
      buffers: donated; empty in a prefill.
      flight: donated.
    """
    mesh, config = serving.mesh.attention, serving.config

    def local(layer: Any, layer_index: Array, buffers: Buffers, flight: Any, inputs: Inputs) -> Any:
        core = _Core(serving, layer_index, vary(buffers, mesh.axes), inputs, columns)
        x, _ = block(
            vary(layer, mesh.axes), flight.x, core.packed, core.attend, config, mesh, layer_index
        )
        return flight.replace(x=x), core.updated_buffers

    in_specs = first_specs(config, mesh), *_attention_specs(serving, buffers, inputs)
    return _shard_map_attention(serving, local, in_specs, buffers_out=True)(
        layer, layer_index, buffers, flight, inputs
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def attention_half(
    serving: Serving,
    columns: int | None,
    layer: Layer[Array],
    layer_index: Array,
    buffers: Buffers,
    flight: Flight[Array],
    inputs: Inputs,
    received: Arrays,
    slot_table: SlotTable,
) -> tuple[Flight[Array], Buffers, Arrays]:
    """Runs the attention half of a layer: combine of the layer before, norm, projections, cache,
    core attention, output projection, router, and the rows for each expert device.

    Args:
      columns: number of columns of the cache that are read; None is all.
      layer_index: index of the layer in the network.
      buffers: donated; empty in a prefill.
      flight: donated.
      received: sums of the layer before, from each expert device; zeros in the first.
    """
    mesh, config = serving.mesh.attention, serving.config

    def local(
        layer: Any,
        layer_index: Array,
        buffers: Buffers,
        flight: Any,
        inputs: Inputs,
        received: Arrays,
        slot_table: SlotTable,
    ) -> Any:
        core = _Core(serving, layer_index, vary(buffers, mesh.axes), inputs, columns)
        x, expert_layer = combine_outputs(flight, received), layer_index - config.num_dense_layers
        flight, sent = attend_and_route(
            serving,
            vary(layer, mesh.axes),
            expert_layer,
            x,
            core.packed,
            core.attend,
            vary(slot_table, mesh.axes),
            flight.choices,
        )
        return flight, core.updated_buffers, sent

    token_spec = PartitionSpec(mesh.axes)
    in_specs = attention_specs(config, mesh), *_attention_specs(serving, buffers, inputs)
    in_specs = *in_specs, (token_spec,) * serving.num_targets, PartitionSpec()
    return _shard_map_attention(serving, local, in_specs, buffers_out=True, sends=True)(
        layer, layer_index, buffers, flight, inputs, received, slot_table
    )


@partial(jax.jit, static_argnums=0)
def experts_half(serving: Serving, experts: Experts[Array], received: Arrays) -> Arrays:
    """Runs the expert half of a layer: its grouped GEMMs on the received rows, with gate weights.

    Args:
      received: messages from each attention device.
    """
    mesh = serving.mesh.experts
    token_spec = PartitionSpec(mesh.axes)

    def local(experts: Experts[Array], received: Arrays) -> Arrays:
        return compute_experts(serving, *vary((experts, received), mesh.axes))

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(expert_specs(mesh), (token_spec,) * serving.num_sources),
        out_specs=(token_spec,) * serving.num_sources,
    )(experts, received)


@partial(jax.jit, static_argnums=0)
def end_step(
    serving: Serving, rest: Transformer[Array], flight: Flight[Array], received: Arrays
) -> tuple[Array, Array | None]:
    """Logits ``[row, vocab]`` of the next token, float32, sharded over all attention devices, and
    the expert ids ``[row, layer, k]`` of the tokens that were run; None if not recorded."""
    mesh, config = serving.mesh.attention, serving.config

    def local(rest: Any, flight: Any, received: Arrays) -> Any:
        rest = vary(rest, mesh.axes)
        x = last_norm(rest, combine_outputs(flight, received), config)
        expert_ids = None
        if flight.choices is not None:
            expert_ids = join_shards(jnp.moveaxis(flight.choices, 0, 1), mesh.sequence)
        return logits_of(rest, x, config, mesh), expert_ids

    token_spec = PartitionSpec(mesh.axes)
    choices_spec = PartitionSpec(mesh.except_sequence) if serving.records_choices else None
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(
            rest_specs(config, mesh),
            flight_specs(serving),
            (token_spec,) * serving.num_targets,
        ),
        out_specs=(token_spec, choices_spec),
    )(rest, flight, received)


@partial(jax.jit, static_argnums=0)
def end_prefill(
    serving: Serving,
    rest: Transformer[Array],
    flight: Flight[Array],
    received: Arrays,
    inputs: Prompts,
) -> tuple[Array, Array | None]:
    """States and expert ids after a prefill, as in `moe.decoding.Prefilled`."""
    mesh, config = serving.mesh.attention, serving.config

    def local(rest: Any, flight: Any, received: Arrays, inputs: Prompts) -> Any:
        x = last_norm(vary(rest, mesh.axes), combine_outputs(flight, received), config)
        return by_row(x, flight.choices, _packed(serving, inputs, None), inputs.lengths, mesh)

    token_spec, rows = PartitionSpec(mesh.axes), PartitionSpec(mesh.except_sequence)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(
            rest_specs(config, mesh),
            flight_specs(serving),
            (token_spec,) * serving.num_targets,
            _input_specs(serving, inputs),
        ),
        out_specs=(rows, rows if serving.records_choices else None),
    )(rest, flight, received, inputs)


class _Core:
    """Core attention of a layer, for a decode step or for a prefill.

    Attributes:
      packed: the tokens as a packed batch.
      attend: core attention of the layer.
    """

    def __init__(
        self,
        serving: Serving,
        layer_index: Array,
        buffers: Buffers,
        inputs: Inputs,
        columns: int | None,
    ):
        config, self._step, self._recorded = serving.config, None, list[Arrays]()
        if isinstance(inputs, Steps):
            keys, rows = buffers.keys, inputs.positions.shape[0]
            assert keys is not None
            first = None if keys.shape[0] == rows else inputs.first
            self._step = StepCore(
                config,
                layer_index,
                keys,
                buffers.values,
                inputs.positions,
                inputs.live,
                first=first,
                columns=columns,
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
        if self._step is not None:
            return Buffers(self._step.keys, self._step.values)
        keys, *values = self._recorded[0]
        return Buffers(keys, values[0] if values else None)


def _packed(
    serving: Serving, inputs: Inputs, core: CoreAttention | LatentCore | None
) -> PackedBatch:
    records = serving.records_choices
    if isinstance(inputs, Steps):
        return packed_step(inputs.tokens, inputs.positions, inputs.live, core, records)
    return packed_prefill(*inputs, serving.config, serving.mesh.attention, records)


def _input_specs(serving: Serving, inputs: Inputs) -> Any:
    rows: Any = PartitionSpec(serving.mesh.attention.except_sequence)
    replicated: Any = PartitionSpec()
    return Steps(rows, rows, rows, replicated) if isinstance(inputs, Steps) else Prompts(rows, rows)


def _buffer_specs(serving: Serving) -> Any:
    mesh = serving.mesh.attention
    heads: Any = PartitionSpec(mesh.except_sequence, mesh.sequence)
    return Buffers(heads, None if caches_latent(serving.config) else heads)


def _attention_specs(serving: Serving, buffers: Buffers, inputs: Inputs) -> tuple[Any, ...]:
    """PartitionSpecs of number, buffers, flight and tokens."""
    buffers_spec = Buffers(None, None) if buffers.keys is None else _buffer_specs(serving)
    return PartitionSpec(), buffers_spec, flight_specs(serving), _input_specs(serving, inputs)


def _shard_map_attention(
    serving: Serving,
    local: Any,
    in_specs: tuple[Any, ...],
    buffers_out: bool = False,
    sends: bool = False,
) -> Any:
    mesh = serving.mesh.attention
    out: list[Any] = [flight_specs(serving)]
    if buffers_out:
        out.append(_buffer_specs(serving))
    if sends:
        out.append((PartitionSpec(mesh.axes),) * serving.num_targets)

    def local_varying(*args: Any) -> Any:
        results = local(*args)
        return vary(results, mesh.axes)

    out_specs: Any = tuple(out) if len(out) > 1 else out[0]
    return jax.shard_map(local_varying, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs)
