"""Attention half and expert half of a disaggregated layer, inside the `jax.shard_map` of their
side.

The attention half combines the expert outputs of the layer before, attends, routes, and writes a
buffer of rows for each expert device; a token is sent to a device once, however many of its experts
are there. The expert half computes the rows it receives, gate weights included, and returns one sum
for each. It rounds as "all_to_all" in `moe.experts.dispatch.choice` does.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention, attention, norm_before
from moe.config import Model, ModelConfig
from moe.disaggregated.m2n import Message
from moe.disaggregated.placement import SlotTable, lookup_slots
from moe.disaggregated.split import SplitMesh
from moe.experts.dispatch.all_to_all import sharded_experts
from moe.experts.dispatch.buffers import DispatchOptions, has_experts_at, slots_of
from moe.experts.feed_forward import dense_term
from moe.experts.permutation import permute_rows
from moe.implementations import selected_implementation
from moe.kernels.rows import combine
from moe.ops.sorting import take_rows
from moe.router.layer import route
from moe.tokens.packing import PackedBatch
from moe.weights import Experts, Layer
from sharding.collectives import local_shard, vary

WORD_DTYPES = {2: jnp.dtype(jnp.uint16), 4: jnp.dtype(jnp.uint32)}
"""Unsigned dtypes by the item size of the tokens."""


def message_width(d_model: int, k: int, dtype: Any) -> int:
    """Number of words of a row that is sent: ``d_model + 2 k 4 / itemsize``, of `itemsize` bytes
    each."""
    return d_model + 2 * k * (4 // jnp.dtype(dtype).itemsize)


def encode_message(
    rows: Float[Array, "row d_model"], slots: Int[Array, "row k"], probs: Float[Array, "row k"]
) -> Shaped[Array, "row width"]:
    """Encodes tokens, the slots of their experts and their gate weights (float32) as rows of
    words."""
    word = WORD_DTYPES[rows.dtype.itemsize]
    fields = rows, slots.astype(jnp.int32), probs.astype(jnp.float32)
    return jnp.concatenate([_to_words(field, word) for field in fields], axis=1)


def decode_message(
    message: Shaped[Array, "row width"], d_model: int, k: int, dtype: Any
) -> tuple[Float[Array, "row d_model"], Int[Array, "row k"], Float[Array, "row k"]]:
    """Decodes a message of `encode_message`: tokens, slots and gate weights."""
    routing_words = (message.shape[1] - d_model) // 2
    return (
        lax.bitcast_convert_type(message[:, :d_model], dtype),
        _from_words(message[:, d_model : d_model + routing_words], k, jnp.int32),
        _from_words(message[:, d_model + routing_words :], k, jnp.float32),
    )


def _to_words(x: Array, word: Any) -> Array:
    return lax.bitcast_convert_type(x, word).reshape(x.shape[0], -1)


def _from_words(words: Array, k: int, dtype: Any) -> Array:
    if words.shape[1] != k:
        words = words.reshape(words.shape[0], k, -1)
    return lax.bitcast_convert_type(words, dtype)


Leaf = TypeVar("Leaf")


class Serving(NamedTuple):
    """Static configuration of the programs of both sides.

    Attributes:
      config: the network, as `moe.decoding.for_step` or `moe.model.for_prefill` returns it.
      num_slots: number of expert slots on each device along ``ep``.
      records_choices: the expert ids of each token are recorded.
    """

    config: ModelConfig
    mesh: SplitMesh
    num_slots: int
    records_choices: bool = False

    @property
    def attention_model(self) -> Model:
        """The network on the attention devices."""
        return Model(self.config, self.mesh.attention)

    @property
    def num_peers(self) -> int:
        """Size of ``ep``; the devices along ``etp``, which share experts, are one peer."""
        return self.mesh.experts.size(self.mesh.experts.ep)

    @property
    def num_sources(self) -> int:
        return self.mesh.attention.layout.num_devices

    @property
    def num_targets(self) -> int:
        return self.mesh.experts.layout.num_devices

    def message_out(self, num_tokens: int) -> Message:
        """Message from an attention device of so many tokens to an expert device.

        The devices along ``etp`` share the rows equally; their messages together have capacity for
        all tokens of the sender.
        """
        config = self.config
        rows = -(-num_tokens // self.mesh.experts.size(self.mesh.experts.etp))
        width = message_width(config.d_model, config.experts_per_token, config.dtype)
        return Message(rows, width, WORD_DTYPES[jnp.dtype(config.dtype).itemsize])

    def message_back(self, num_tokens: int) -> Message:
        """Message from an expert device back to an attention device."""
        rows = self.message_out(num_tokens).rows
        return Message(rows, self.config.d_model, jnp.dtype(self.config.dtype))


@struct.dataclass
class TokenState(Generic[Leaf]):
    """State of the local tokens between two programs of the attention side.

    Attributes:
      x: ``[token, d_model]`` the residual stream after the attention of a layer.
      shared_output: ``[token, d_model]`` output of the layer's shared expert; None if it has none.
      row_indices: ``[token, min(num_peers, k)]`` indices of the token's rows in the concatenated
        received arrays, past the end for none.
      choices: ``[layer, token, k]`` expert ids so far; None if they are not recorded.
    """

    x: Leaf
    shared_output: Leaf | None
    row_indices: Leaf
    choices: Leaf | None


def state_specs(serving: Serving) -> TokenState[PartitionSpec]:
    """PartitionSpecs of a `TokenState`."""
    token_spec, config = PartitionSpec(serving.mesh.attention.axes), serving.config
    choices = PartitionSpec(None, serving.mesh.attention.axes)
    return TokenState(
        x=token_spec,
        shared_output=token_spec if config.d_ff else None,
        row_indices=token_spec,
        choices=choices if serving.records_choices else None,
    )


def initial_state(serving: Serving, x: Float[Array, "token d_model"]) -> TokenState[Array]:
    """Initial state of tokens, with nothing in flight to the experts."""
    config, (num_tokens, _) = serving.config, x.shape
    k, choices = config.experts_per_token, None
    rows = serving.num_targets * serving.message_out(num_tokens).rows
    shared_output = jnp.zeros_like(x) if config.d_ff else None
    if serving.records_choices:
        shape = config.num_expert_layers, num_tokens, k
        choices = jnp.full(shape, config.num_experts, jnp.int32)
    row_indices = jnp.full((num_tokens, min(serving.num_peers, k)), rows, jnp.int32)
    state = TokenState(x, shared_output, row_indices, choices)
    return vary(state, serving.mesh.attention.axes)


def combine_outputs(
    state: TokenState[Array], received: tuple[Array, ...]
) -> Float[Array, "token d_model"]:
    """Residual stream after the whole layer: adds the sums from each expert device."""
    x = state.x
    out = combine(jnp.concatenate(received), state.row_indices).astype(x.dtype)
    out = out if state.shared_output is None else out + state.shared_output
    return x + out


def attend_and_route(
    serving: Serving,
    layer: Layer[Array],
    layer_index: Array,
    x: Float[Array, "token d_model"],
    packed: PackedBatch,
    core: CoreAttention | LatentCore,
    slot_table: SlotTable,
    choices: Array | None,
) -> tuple[TokenState[Array], tuple[Array, ...]]:
    """Attention half of a layer, from the residual stream before it.

    Args:
      layer: weights; its experts are a router and a selection bias.
      layer_index: index of the layer among those with experts.
      x: the residual stream after the layer before, this device's tokens.
      packed: the batch that these tokens are of.
      choices: expert ids, as `TokenState.choices`; the ids of this layer are written.

    Returns:
      The state, and a message for each expert device.
    """
    config, mesh = serving.config, serving.mesh.attention
    assert layer.experts is not None
    positions = local_shard(packed.positions, mesh.cp)
    global_index = layer_index + config.num_dense_layers
    x = x + attention(layer.attention, x, positions, core, serving.attention_model, global_index)
    h = norm_before(x, layer.norm, config)
    routing, stats = route(layer.experts, h, packed, serving.attention_model)
    if choices is not None:
        assert stats.choices is not None
        choices = choices.at[layer_index].set(stats.choices.astype(choices.dtype))
    slots = lookup_slots(routing.experts, slot_table)

    (num_tokens, k), peers = slots.shape, serving.num_peers
    no_slot = peers * serving.num_slots
    message = serving.message_out(num_tokens)
    per_peer = message.rows * serving.num_targets // peers
    num_rows = peers * per_peer
    is_sent = has_experts_at(slots, serving.num_slots, peers)
    position = jnp.cumsum(is_sent, axis=0) - 1
    row = jnp.where(is_sent, jnp.arange(peers)[None] * per_peer + position, num_rows)
    token, row_indices = slots_of(row, num_rows, k)
    ids = jnp.where(token[:, None] < num_tokens, take_rows(slots, token), no_slot)
    rows = permute_rows(h, token, row_indices)
    message_rows = encode_message(rows, ids, take_rows(routing.probs, token))
    state = TokenState(x, dense_term(layer, h, mesh, config.activation), row_indices, choices)
    messages = tuple(jnp.split(message_rows, serving.num_targets))
    return vary((state, messages), mesh.axes)


def compute_experts(
    serving: Serving, experts: Experts[Array], received: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Expert half of a layer.

    Args:
      received: messages from each attention device.

    Returns:
      For each attention device the sums of its rows: for each row the sum over the token's experts
      on this device, with gate weights.
    """
    config, mesh = serving.config, serving.mesh.experts
    k, message = config.experts_per_token, jnp.concatenate(received)
    rows, slots, probs = decode_message(message, config.d_model, k, config.dtype)
    # Capacity for any routing: a row has at most min(k, slots) experts on this device.
    num_rows = rows.shape[0] * mesh.size(mesh.etp) * min(k, serving.num_slots)
    implementation = selected_implementation(Model(config, mesh), "experts")
    options = DispatchOptions(mesh, product=implementation, activation=config.activation)
    sums, _ = sharded_experts(experts, rows, slots, probs, num_rows, options)
    return tuple(jnp.split(vary(sums.astype(rows.dtype), mesh.axes), serving.num_sources))
