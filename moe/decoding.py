"""Decode step over a KV cache, which a prefill has filled (`moe.model.prefill`).

The token at position p of a row is cached in column p of that row, whatever the other rows do: rows
may be at different positions, and the results of a row do not depend on when it was admitted. The
cache has a buffer of keys and one of values for each layer or, with a scanned stack, for each of
its layer groups (`moe.layers.depth`). They are updated in place: a loop that carries them never
copies them.

Functions run inside one `jax.shard_map`, on the rows of a ``dp`` rank.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.attention.delta import DeltaCore, DeltaState, run_step
from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention
from moe.attention.rotary import RotaryCache
from moe.cache import Cache, StepCore, StepTokens, cache_of, index_layer
from moe.config import Model, ModelConfig
from moe.head import logits_of
from moe.implementations import selected_implementation
from moe.kernels.choice import devices_of
from moe.layers.block import block
from moe.layers.depth import (
    depth_of,
    is_scanned,
    is_stack,
    num_layers,
    period_of_stack,
    runs_of,
)
from moe.model import embed
from moe.ops.mask import Window
from moe.ops.precision import rms_norm
from moe.ops.zigzag import ZigzagLayout
from moe.router.statistics import layers_in_order
from moe.tokens.packing import PackedBatch
from moe.weights import DeltaNet, Layer, Transformer
from sharding.collectives import join_shards


def step_config(model: Model) -> ModelConfig:
    """Configuration of the layer groups of decode steps and of their cache: on GPUs the layers are
    unrolled if `Execution.scan_layers` is None.

    In a scan each step would copy every layer's weights out of their stack. Layers with experts are
    unrolled if their matrices are read in place (`keeps_expert_stack`), as unstacked they would be
    in memory twice.
    """
    config, platform = model.config, devices_of(model.mesh).platform
    if config.execution.scan_layers is not None or platform != "gpu":
        return config
    if config.num_experts and not _reads_slices(model):
        return config
    return replace(config, execution=replace(config.execution, scan_layers=False))


def keeps_expert_stack(model: Model) -> bool:
    """True if decode steps are unrolled and read the matrices of experts in the stack of all
    layers."""
    config, first = step_config(model), model.config.num_dense_layers
    depth = config.num_layers - first
    is_unrolled = not is_scanned(depth, config.execution, period_of_stack(config, depth, first))
    return bool(config.num_experts) and is_unrolled and _reads_slices(model)


def _reads_slices(model: Model) -> bool:
    """True if the product of experts is the kernel: XLA passes it a slice of a stack in place."""
    is_gpu = devices_of(model.mesh).platform == "gpu"
    return is_gpu and selected_implementation(model, "experts") == "mosaic"


def for_step(config: ModelConfig) -> ModelConfig:
    """Configuration of a decode step: one dispatch chunk, no capacity that drops tokens, and expert
    buffers for any routing."""
    execution = replace(config.execution, expert_chunks=1)
    # A step has few tokens, and cannot be recomputed after an overflow.
    config = replace(config, execution=execution, capacity_factor=None)
    return config.for_any_routing()


def packed_step(
    inputs: StepTokens,
    core: CoreAttention | LatentCore | None = None,
    record_choices: bool = False,
    rope: RotaryCache | None = None,
) -> PackedBatch:
    """Packed batch of a decode step: one token of each row.

    Args:
      inputs: the tokens; tokens of rows that are not live are padding.
      core: core attention of all layers; None if it is not taken from the batch.
      record_choices: the router statistics contain the expert ids.
      rope: rotary cos/sin tables of these tokens; None computes them.
    """

    def core_attention_of_layer(
        index: int | Array, window: Window = None
    ) -> CoreAttention | LatentCore:
        assert core is not None
        return core

    return PackedBatch(
        tokens=inputs.tokens,
        positions=inputs.positions,
        multiplicity=inputs.live.astype(jnp.float32),
        core_attention_of_layer=core_attention_of_layer,
        sequences=None,
        zigzag=ZigzagLayout(((inputs.tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
        rope=rope,
    )


def decode_step(
    layers: tuple[Layer[Array], ...],
    weights: Transformer[Array],
    cache: Cache[Array],
    inputs: StepTokens,
    model: Model,
    record_choices: bool = False,
    rope: RotaryCache | None = None,
) -> tuple[Float[Array, "local vocab"], Cache[Array], Int[Array, "row layer k"] | None]:
    """Decode step: appends one token to every live row and returns the logits of the next.

    Args:
      layers: the layers of `weights` in the groups of `moe.layers.depth.split_layer_groups`,
        unstacked once outside the loop.
      cache: written at `positions` of live rows, in place if the caller donates it; other rows stay
        unchanged.
      inputs: the tokens to append; their positions are less than the cache's columns.
      record_choices: also return the expert ids of each token.
      rope: rotary cos/sin tables of all positions, computed once outside the loop; None computes
        them for the tokens.

    Raises:
      ValueError: if `Execution.decode_attention` names a kernel that does not support the network.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the expert ids, `num_experts`
      for rows that are not live; None if they were not requested.
    """
    model = replace(model, config=for_step(model.config))
    token_rope = None if rope is None else rope.gather(inputs.positions)
    packed = packed_step(inputs, record_choices=record_choices, rope=token_rope)
    step = _Step(packed, inputs, model)
    x, cached_kv, choices, first = embed(weights, inputs.tokens, model), [], [], 0
    # Latent vectors are both keys and values: there is one buffer.
    kv_buffers = zip(cache.keys, *[cache.values] * bool(cache.values), strict=True)
    delta_buffers = zip(cache.states, cache.tails, strict=True)
    for run in runs_of(layers, model.config):
        buffers = tuple(
            DeltaState(*next(delta_buffers)) if _is_delta(group) else next(kv_buffers)
            for group in run
        )
        x, buffers, expert_ids = _run_groups(step, first, run, x, buffers)
        first += depth_of(run)
        cached_kv += buffers
        if expert_ids is not None:
            choices.append(expert_ids)
    x = rms_norm(x, weights.norm, model.config.norm_epsilon)
    expert_ids = None
    if record_choices:
        expert_ids = join_shards(jnp.moveaxis(jnp.concatenate(choices), 0, 1), model.mesh.sequence)
    return logits_of(weights, x, model), cache_of(cached_kv), expert_ids


class _Step(NamedTuple):
    """Inputs of a decode step that all layers share."""

    packed: PackedBatch
    inputs: StepTokens
    model: Model


LayerCache = DeltaState | tuple[Array, ...]
"""Buffers of a layer group: keys and, unless these are latent vectors, values; or the states of
Gated DeltaNet."""


def _is_delta(group: Layer[Array]) -> bool:
    return isinstance(group.attention, DeltaNet)


def _run_groups(
    step: _Step,
    first: int,
    run: tuple[Layer[Array], ...],
    x: Array,
    buffers: tuple[LayerCache, ...],
) -> tuple[Array, tuple[LayerCache, ...], Array | None]:
    """Runs the layer groups of one of `moe.layers.depth.runs_of`, a layer or a scanned stack, from
    the layer of index `first` on.

    Returns the hidden states; the buffers of each group; and expert ids ``[layer, local, k]``, None
    if they were not requested or the layers have no experts.
    """
    if not is_stack(run[0]):
        x, layer_buffers, layer_ids = _run_layer(step, first, run[0], x, buffers[0], ())
        return x, (layer_buffers,), None if layer_ids is None else layer_ids[None]

    def run_period(
        carry: tuple[Array, tuple[LayerCache, ...]], inputs: tuple[Array, tuple[Layer[Array], ...]]
    ) -> tuple[tuple[Array, tuple[LayerCache, ...]], list[Array | None]]:
        (x, stored), (period, layers) = carry, inputs
        updated, choices = list[LayerCache](), list[Array | None]()
        for index, layer in enumerate(layers):
            layer_index = first + period * len(run) + index
            x, layer_buffers, layer_ids = _run_layer(
                step, layer_index, layer, x, stored[index], (period,)
            )
            updated.append(layer_buffers)
            choices.append(layer_ids)
        return (x, tuple(updated)), choices

    # The buffers are in the carry, and a layer writes its slice of them. As inputs and outputs per
    # iteration they would be copied completely.
    periods = jnp.arange(num_layers(run[0]))
    (x, buffers), choices = lax.scan(run_period, (x, buffers), (periods, run))
    expert_ids = [layer_ids for layer_ids in choices if layer_ids is not None]
    return x, buffers, layers_in_order(*expert_ids) if expert_ids else None


def _run_layer(
    step: _Step,
    layer_index: int | Array,
    layer: Layer[Array],
    x: Array,
    before: LayerCache,
    stack_index: tuple[Array, ...],
) -> tuple[Array, LayerCache, Array | None]:
    """Runs a layer: returns the residual stream after it, its updated buffers, and its expert ids.

    The buffers `before` are the buffers of the layer, or of a stack in which it has the index
    `stack_index`; that is empty for a layer by itself.
    """
    if isinstance(before, DeltaState):
        delta = step.model.config.delta
        assert delta is not None
        # Rows that are not live stay as they are.
        state = DeltaState(*(index_layer(x, stack_index) for x in before))
        new_states = list[DeltaState]()
        run_delta = partial(run_step, delta, state, step.inputs.live)
        core = DeltaCore(run_delta).record_states(new_states.append)
        x, router = block(layer, x, step.packed, core, step.model, layer_index)
        pairs = zip(before, *new_states, strict=True)
        updated: LayerCache = DeltaState(*(_update_layer(x, new, stack_index) for x, new in pairs))
    else:
        core = StepCore(step.model, layer_index, before, step.inputs, stack_index)
        x, router = block(layer, x, step.packed, core.attend, step.model, layer_index)
        updated = core.buffers
    return x, updated, None if router is None else router.choices


def _update_layer(buffer: Array, new: Array, stack_index: tuple[Array, ...]) -> Array:
    if not stack_index:
        return new
    return lax.dynamic_update_index_in_dim(buffer, new, *stack_index, axis=0)
