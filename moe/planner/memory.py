"""Memory of a device in training: weights, optimizer, gradients, activations, buffers."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from moe.planner.method import Batch, Method, for_weights
from moe.planner.models import ModelSizes, layers_on_device, weight_groups, weight_layout
from moe.planner.volumes import (
    kv_replication,
    relayed_tokens,
    slots_per_peer,
    tokens_per_expert,
)
from sharding.costs.transfer import balanced_rows, group_strides
from sharding.folding import Layout

FLOAT32, BFLOAT16 = 4, 2
ALL_SCORES = ("plain", "xla")
"""Attention that has the scores of all queries and keys in memory at once."""
BLOCK_QUERIES, MAX_SPANS = 128, 8
"""Queries of a block of attention, and stretches of them that are compiled apart, at most."""
NUM_WORKING_SCORES = 3
"""Arrays of scores that a backward pass has at once: powers, their gradients and the scores'
gradients. XLA's CPU compiler runs the stretches of a row side by side, so that all of them are
there.
"""
NUM_SAVED_SCORES = 2
"""Arrays of scores that "plain" keeps of a layer where everything is kept: powers and
probabilities."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      weights: as they are used, under full sharding their shards.
      optimizer: moments and master weights, in shards (ZeRO-1).
      gradients: their sum over micro-batches, and the current micro-batch's if they are
        accumulated; of a single micro-batch that alone.
      activations: residuals of the layers for the backward pass, of all micro-batches in flight.
      buffers: temporary values: of the current layer, logits, gathered shards, and the new
        residuals of a pipeline chunk.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.optimizer + self.gradients + self.activations + self.buffers


def memory(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> Memory:
    """Memory of one device.

    Attention scores count if `Execution.attention` materialises them in memory: kernels of
    accelerators hold them on the chip.
    """
    tokens, num_micro_batches = batch.local_tokens(layout), batch.num_micro_batches(layout)
    resident = model_states(
        model, weight_layout(model, layout), for_weights(method), num_micro_batches > 1
    )
    vocab_width = -(-model.vocab_size // layout.tp)
    vocab_width = min(vocab_width, method.execution.vocab_chunk or vocab_width)
    logits = 2 * FLOAT32 * tokens * layout.tp * vocab_width
    layers = layer_memory(model, layout, batch, method)
    return Memory(
        weights=resident.weights,
        optimizer=resident.optimizer,
        # A pipeline adds up the gradient of a chunk of its layers at a time.
        gradients=resident.gradients - resident.added * (1 - 1 / layout.vpp),
        activations=layers.activations,
        # Gradients are sent after layers and logits are done.
        buffers=resident.gathered + max(logits + layers.working, resident.comm_buffer),
    )


class LayerMemory(NamedTuple):
    """Bytes that the layers need on one device in a forward and a backward pass.

    Attributes:
      activations: as in `Memory`.
      working: temporary values of the current layer, and the new residuals of a pipeline chunk.
    """

    activations: float
    working: float


def layer_memory(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> LayerMemory:
    """Memory of the layers for a micro-batch, beside weights and their gradients."""
    tokens, num_micro_batches = batch.local_tokens(layout), batch.num_micro_batches(layout)
    depth = layers_on_device(model, layout)
    # A layer's values, and as many gradients.
    remat = method.execution.remat
    values = activation_bytes(model, layout, tokens, method, "none")
    saved_bytes = activation_bytes(model, layout, tokens, method, remat)
    working_bytes, scores = 2 * values, working_score_bytes(model, layout, batch, method)
    # If a chunk is a single layer and has no loop over layers, XLA's CPU programs need less: as if
    # scores took the place of gradients. Fitted to them, not derived.
    working_bytes += scores if depth > layout.vpp else max(scores - values, 0)
    if method.repeats(remat):
        # The backward pass uses its residuals directly, without copies of them.
        working_bytes -= saved_bytes
    if remat == "full" and method.resends:
        # Its input and the results of collectives are not recomputed; the tokens received by the
        # experts are permuted into rows and are not among its values.
        working_bytes -= saved_bytes
        working_bytes += dispatched_bytes(model, layout, tokens, method)
    if layout.pp > 1 and not method.in_place:
        working_bytes += depth // layout.vpp * saved_bytes
    working_bytes += partial_gradient_bytes(model, layout, batch, method)
    working_bytes += relayed_bytes(model, layout, tokens, method)
    saved_per_layer = saved_bytes + saved_score_bytes(model, layout, batch, method, remat)
    activations = layers_in_flight(model, layout, num_micro_batches) * saved_per_layer
    # In a pipeline residuals that depend on weights only are recomputed.
    if method.duplicates_experts and remat == "none" and layout.pp == 1:
        expert_parameters = model.expert_parameters / (layout.ep * layout.etp)
        activations += model.num_expert_layers * expert_parameters * method.stored.weight
    return LayerMemory(activations, working_bytes)


class States(NamedTuple):
    """Bytes on one device that do not depend on batch and rematerialisation.

    Attributes:
      weights, optimizer, gradients: as in `Memory`.
      gathered: weights that full sharding has gathered at a time.
      comm_buffer: `comm_buffer_bytes`.
      added: bytes of `gradients` of all layers that are added to their sum.
    """

    weights: float
    optimizer: float
    gradients: float
    gathered: float
    comm_buffer: float
    added: float


@functools.lru_cache(maxsize=1024)
def model_states(model: ModelSizes, layout: Layout, method: Method, adds_up: bool) -> States:
    """Memory of weights, gradients and optimizer on one device.

    Args:
      adds_up: true with gradient accumulation over multiple micro-batches.
    """
    depth = layers_on_device(model, layout)
    weights = optimizer = gradients = gathered = added = 0.0
    for group in weight_groups(model, layout):
        stored, full, shard = group.stored(method), group.parameters, group.shard_size(layout)
        weights += (shard if method.fsdp else full) * stored.weight
        optimizer += shard * (stored.master + stored.moments)
        # A sum over micro-batches and the gradient that is added to it; the gradient of a single
        # one keeps its dtype until the optimizer reads it. A pipeline always sums.
        gradient_bytes = stored.gradient
        if adds_up:
            gradient_bytes += stored.summand
        elif layout.pp == 1 and stored.summand:
            gradient_bytes = stored.summand
        held = shard if method.fsdp and group.in_layers else full
        gradients += held * gradient_bytes
        added += held * stored.summand * (adds_up and group.in_layers)
        if method.fsdp:
            # The current layer, embedding and head, gathered.
            gathered += full * stored.weight_comm / (depth if group.in_layers else 1)
    comm_buffer = comm_buffer_bytes(model, layout, method)
    return States(weights, optimizer, gradients, gathered, comm_buffer, added)


def partial_gradient_bytes(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method
) -> float:
    """Bytes of a layer's additional partial gradients, until they are added up: one of all weights
    for each half of the rows, and one of the experts for each chunk of these."""
    num_streams, chunks, total = len(method.streams(batch)), method.execution.num_chunks, 0.0
    if num_streams == chunks == 1:
        return total
    for group in weight_groups(model, layout):
        if group.in_layers:
            num_partial = num_streams * (chunks if group.what == "experts" else 1)
            bytes_each = group.stored(method).weight
            total += (num_partial - 1) * group.parameters / group.depth * bytes_each
    return total


def comm_buffer_bytes(model: ModelSizes, layout: Layout, method: Method) -> float:
    """Bytes of the largest gradient in bfloat16, as it is sent and received: of a stack of matrices
    of all layers (the gate and up of experts or dense layers, two thirds of them, or half of
    attention's), or of the embedding."""
    if method.gradient_wire == "float32":
        return 0.0
    fractions = {"experts": 2 / 3, "dense layers": 2 / 3, "first dense layers": 2 / 3}
    fractions |= {"attention": 1 / 2, "embedding and head": 1.0 if model.tied else 1 / 2}
    buffers = [0.0]
    for group in weight_groups(model, layout):
        inside, across = (
            math.prod(size for _, size in group_strides(group.replicas, side, layout))
            for side in ("inside", "across")
        )
        if across > 1:
            fraction = fractions.get(group.what, 1.0)
            buffers.append(2 * BFLOAT16 * group.parameters * fraction / inside)
    return max(buffers)


def layers_in_flight(model: ModelSizes, layout: Layout, num_micro_batches: int) -> int:
    """Layers whose residuals a device keeps at a time.

    A pipeline stage keeps every chunk in flight, and the first stage its dense layers; all stages
    have buffers of this size.
    """
    if layout.pp == 1:
        return model.num_layers
    depth = layers_on_device(model, layout) // layout.vpp
    chunks = chunks_in_flight(layout, num_micro_batches)
    first = first_chunks_in_flight(layout, num_micro_batches)
    return chunks * depth + first * model.num_dense_layers


def chunks_in_flight(layout: Layout, num_micro_batches: int) -> int:
    """Most model chunks in flight on a stage, between their forward and backward pass.

    ``pp`` with one chunk on a stage, else ``pp vpp + pp - 1``; fewer if there are few
    micro-batches. `sharding.schedule.Schedule.slots` has a slot for each.

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
      section 2.2. https://arxiv.org/abs/2104.04473
    """
    chunks = layout.vpp * min(num_micro_batches, layout.pp)
    if layout.vpp > 1:
        chunks += min(max(num_micro_batches - layout.pp, 0), layout.pp - 1)
    return chunks


def first_chunks_in_flight(layout: Layout, num_micro_batches: int) -> int:
    """Chunks in flight that are the first of all chunks."""
    return min(num_micro_batches, layout.pp if layout.vpp == 1 else 2 * layout.pp)


def activation_bytes(
    model: ModelSizes, layout: Layout, tokens: int, method: Method, remat: str
) -> float:
    """Bytes of the residuals of one layer.

    "full" keeps the input and, with `Method.resends`, the results of collectives over tokens.
    "selective" and "projections" keep `selective_activation_bytes`; the first, if communication is
    not repeated (`Method.resends`), the results of products and of collectives. "none" keeps the
    results of norms, activations and permutations as well. Attention's scores are
    `saved_score_bytes`.
    """
    if method.repeats(remat):
        return selective_activation_bytes(model, layout, tokens, method, remat)
    h, width = model.d_model, method.itemsize
    # Shards of what the tp and etp ranks hold together.
    hidden, dense_width = model.d_expert / layout.etp, model.d_ff
    gathered = layout.tp if layout.tp > 1 else 0
    rows = received = float32_values = 0
    if model.num_experts:
        rows = expert_rows(model, layout, tokens, method)
        received = received_tokens(model, layout, tokens, method)
        float32_values = received * 2 * model.experts_per_token
    # The input; tokens for heads and for hidden units, and the sum of attention's parts.
    elements = tokens * h * (1 + gathered + (gathered if dense_width else 0) + (gathered > 0))
    key_shards = {"gather": layout.cp, "ring": 1, "ulysses": kv_replication(model, layout)}
    key_value_width = (model.keys + model.values) * key_shards[method.context]
    if remat == "full":
        if not method.resends:
            return float(tokens * h * width)
        if layout.cp > 1:
            # Keys and values of the others; with a ring, the output of attention with a log-sum for
            # each query; with Ulysses, all that is exchanged, in both directions.
            exchanged = model.queries + model.outputs + key_value_width
            across = {"gather": key_value_width, "ring": model.outputs, "ulysses": exchanged}
            elements += tokens * across[method.context]
            elements += tokens * model.num_heads * (method.context == "ring") * FLOAT32 // width
        return float(elements * width + dispatched_bytes(model, layout, tokens, method))
    elements += tokens * (model.queries + key_value_width + 2 * dense_width + h * (gathered == 0))
    elements += tokens * model.latents
    if method.repeats_experts:
        rows = received = 0
    elements += rows * 2 * hidden
    float32_values += tokens * (model.num_heads + model.num_experts)
    if remat == "none":
        # Two norms and their sum, attention's output, rows, and hidden units after activation. The
        # received tokens have no gradient of their own: they are permuted into rows.
        elements += tokens * (3 * h + model.outputs + dense_width) + rows * (h + hidden)
        if not method.fused_activation:
            # Factors of the derivative in a dense layer, and of one in the place of experts its
            # input, the stream and the heads before their projection.
            elements += tokens * 3 * dense_width
            elements += tokens * (2 * h + model.outputs) * (not model.num_experts)
        float32_values += tokens * 3 * model.num_experts
    else:
        elements += received * h
    return float(elements * width + float32_values * FLOAT32)


def dispatched_bytes(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> float:
    """Bytes of tokens that the experts of a device receive, with expert ids and gate weights."""
    bytes_per_token = model.d_model * method.itemsize
    if method.execution.activation_wire is not None:
        bytes_per_token = model.d_model + FLOAT32
    bytes_per_token += 2 * model.experts_per_token * FLOAT32
    return float(received_tokens(model, layout, tokens, method) * bytes_per_token)


def relayed_bytes(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> float:
    """Bytes of tokens that a device passes on inside its server, in two levels of all-to-alls, with
    expert ids and gate weights, and of the sums that it passes back."""
    if not model.num_experts:
        return 0.0
    bytes_per_token = 2 * (model.d_model * method.itemsize + model.experts_per_token * FLOAT32)
    return float(relayed_tokens(model, layout, tokens, method) * bytes_per_token)


def selective_activation_bytes(
    model: ModelSizes, layout: Layout, tokens: int, method: Method, remat: str
) -> float:
    """Bytes of the residuals of one layer under "selective" or "projections", as in `moe.remat`.

    ``(2 k f + 4 + 2 / m) T h`` elements of T tokens where routing is even: the residual stream
    twice, queries, keys, values, the output of attention, gate and up; and in float32 a log-sum for
    each query head, the router's logits and top-k indices. Queries, keys and values are those
    before norms, or the vectors that latent attention expands; under "projections" there are none.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.3. https://arxiv.org/abs/2505.11432
    """
    elements = tokens * (2 * model.d_model + model.outputs + 2 * model.d_ff)
    if remat == "selective" and model.keeps_projected:
        elements += tokens * model.projected
    elif remat == "selective":
        replication = kv_replication(model, layout) if method.context == "ulysses" else 1
        elements += tokens * (model.queries + (model.keys + model.values) * replication)
    float32_values = tokens * model.num_heads
    if model.num_experts:
        elements += expert_rows(model, layout, tokens, method) * 2 * model.d_expert // layout.etp
        float32_values += tokens * (model.num_experts + model.experts_per_token)
    return float(elements * method.itemsize + float32_values * FLOAT32)


def expert_rows(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> int:
    """Rows of the expert buffers of a device: as many as in even routing, a multiple of them with
    `Execution.buffer_factor`, or the worst case."""
    factor = method.execution.buffer_factor
    if method.even and factor is None:
        return tokens * model.experts_per_token * layout.etp
    local = model.num_experts // layout.ep
    most = tokens * min(model.experts_per_token, local)
    if model.capacity_factor is not None:
        most = min(most, tokens_per_expert(model, tokens) * local)
    most *= layout.ep * layout.etp
    # Without other devices there are no buffers to bound.
    if factor is None or layout.ep * layout.etp == 1:
        return most
    return min(most, balanced_rows(factor, tokens, model.experts_per_token, layout))


def received_tokens(model: ModelSizes, layout: Layout, tokens: int, method: Method) -> int:
    """Tokens that the experts of a device receive from all devices that share them, if any do."""
    num_sharing = layout.ep * layout.etp
    if num_sharing == 1 or not model.num_experts:
        return 0
    if method.dispatch == "all_gather":
        return num_sharing * tokens
    if method.even and method.execution.buffer_factor is None:
        return tokens * model.experts_per_token * layout.etp
    return num_sharing * slots_per_peer(model, layout, tokens, method)


def saved_score_bytes(
    model: ModelSizes, layout: Layout, batch: Batch, method: Method, remat: str
) -> float:
    """Bytes of attention scores that a layer keeps for its backward pass."""
    if method.execution.attention not in ALL_SCORES or remat != "none":
        return 0.0
    return NUM_SAVED_SCORES * _all_score_bytes(model, layout, batch, method)


def working_score_bytes(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> float:
    """Bytes of attention scores in memory during a layer's backward pass, if no kernel keeps them
    on the chip.

    "plain" attention materialises the scores of all queries and keys of a micro-batch, "blocked" of
    a row's blocks of queries, each with keys up to its own end (`moe.attention.blocked`).
    """
    if method.execution.attention in ALL_SCORES:
        return NUM_WORKING_SCORES * _all_score_bytes(model, layout, batch, method)
    if method.execution.attention != "blocked":
        return 0.0
    row_bytes = FLOAT32 * model.num_heads / layout.tp * batch.time**2 / layout.cp
    blocks = -(-batch.time // BLOCK_QUERIES)
    # Queries that are not the last ones of all keys are one stretch, block by block. Two blocks are
    # what XLA's CPU programs come nearest to: fitted to them, not derived.
    if layout.cp > 1 and method.context != "ulysses":
        return NUM_WORKING_SCORES * row_bytes * min(2 / blocks, 1)
    return NUM_WORKING_SCORES * row_bytes * (1 + 1 / min(blocks, MAX_SPANS)) / 2


def _all_score_bytes(model: ModelSizes, layout: Layout, batch: Batch, method: Method) -> float:
    """Bytes of the scores of all rows of a device and of its heads, float32."""
    queries = batch.local_tokens(layout) * layout.tp
    keys = batch.time / (layout.cp if method.context == "ring" else 1)
    return FLOAT32 * model.num_heads / layout.tp * queries * keys
