"""The forward pass: functions over the weight records, run inside one `jax.shard_map`.

Sequences are spread over ``dp``; within a sequence-parallel group the flattened tokens are spread over
``tp``. The same block serves training and decoding: they differ in `attend`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention import Attend, attention, causal, read_values, rms_norm
from moe.config import ModelConfig
from moe.dispatch import dispatch
from moe.experts import dense
from moe.routing import RouterStatistics, assignments, route, sequence_share, statistics
from moe.weights import Layer, Transformer
from sharding.collectives import all_sum, gather_tokens, join_shards, own_shard, vary
from sharding.folding import FoldedMesh

Tokens = Int[Array, "batch time"]
Valid = Bool[Array, "batch time"]


def positions_of(valid: Valid) -> Int[Array, "batch time"]:
    """The place of each token among the valid ones of its row, from 0; padding gets 0 or more."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def embed(
    weights: Transformer[Array], tokens: Int[Array, "token"], config: ModelConfig, mesh: FoldedMesh
) -> Float[Array, "local d_model"]:
    """The residual stream at its start, this rank's shard of the flattened tokens."""
    tokens = vary(own_shard(tokens, mesh.tp), mesh.axes)
    # The table starts with variance 1 / d_model, right for a tied head; the stream starts with 1.
    scale = config.d_model**0.5
    return (weights.embedding[tokens] * scale).astype(config.dtype)


def feed_forward(
    layer: Layer[Array],
    x: Float[Array, "local d_model"],
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The feed-forward term of a block: routed experts, the dense or shared expert, or both.

    Args:
      x: the residual stream.
      valid: of all the gathered tokens; padding is never routed and never counted.
    """
    h = rms_norm(x, layer.norm, config.norm_epsilon)
    out, stats = jnp.zeros_like(h), None
    if layer.experts is not None:
        own_valid = vary(own_shard(valid.reshape(-1), mesh.tp), mesh.axes)
        logits = h.astype(jnp.float32) @ layer.experts.router
        routing, probabilities = route(logits, own_valid, config)
        counts = assignments(routing.experts, config.num_experts)
        whole = gather_tokens(jax.lax.stop_gradient(counts), mesh.tp)
        share = sequence_share(whole.reshape(*valid.shape, -1), valid)
        share = jnp.broadcast_to(share[:, None], (*valid.shape, config.num_experts))
        share = own_shard(share.reshape(-1, config.num_experts), mesh.tp)
        stats = statistics(logits, probabilities, counts, share, own_valid)
        out = out + dispatch(layer.experts, h, routing, mesh)
    if layer.dense is not None:
        out = out + dense(layer.dense, h, mesh)
    return out, stats


def block(
    layer: Layer[Array],
    x: Float[Array, "local d_model"],
    valid: Valid,
    positions: Int[Array, "token"],
    attend: Attend,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """One pre-norm block."""
    x = x + attention(layer.attention, x, positions, attend, config, mesh)
    out, stats = feed_forward(layer, x, valid, config, mesh)
    return x + out, stats


def hidden(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
    attend_in_layer: Callable[[int], Attend] | None = None,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The normalised last residual stream at every position, this rank's shard.

    Args:
      tokens: ids, the sequences of this ``dp`` rank.
      valid: which of them are not padding.
      attend_in_layer: from the number of a layer to how it reads values; None reads causally.

    Returns:
      The hidden states and, with experts, the router's sums over layers on this device, `load` with a
      row per layer.
    """
    _check_divides(tokens.size, mesh)
    positions = positions_of(valid).reshape(-1)
    visible = causal(valid)

    def read(query, key, value):
        shape = (*valid.shape, -1, query.shape[-1])
        out = read_values(query.reshape(shape), key.reshape(shape), value.reshape(shape), visible)
        return out.reshape(query.shape)

    x = embed(weights, tokens.reshape(-1), config, mesh)
    collected = []
    for index in range(config.num_layers):
        layer = layer_of(weights, index)
        attend = read if attend_in_layer is None else attend_in_layer(index)
        x, stats = block(layer, x, valid, positions, attend, config, mesh)
        collected.append(stats)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    if config.num_experts == 0:
        return x, None
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *collected)
    return x, total.replace(load=jnp.stack([stats.load for stats in collected]))


def layer_of(weights: Transformer[Array], index: int) -> Layer[Array]:
    """The weights of one layer out of the stack."""
    return jax.tree.map(lambda stacked: stacked[index], weights.layers)


def logits_of(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local vocab"]:
    """Scores of the next token, float32."""
    if config.head == "value":
        raise ValueError('head="value" has no logits: this is a critic; use `values`.')
    if weights.head is None:
        head = weights.embedding.T
    else:
        head = weights.head
    return (x @ head.astype(x.dtype)).astype(jnp.float32)


def next_token_logits(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local vocab"], RouterStatistics[Array] | None]:
    """Scores of the token after each position, this rank's shard of the flattened positions."""
    x, stats = hidden(weights, tokens, valid, config, mesh)
    return logits_of(weights, x, config), stats


def align_to_tokens(
    after: Float[Array, "local"], shape: tuple[int, int], mesh: FoldedMesh
) -> Float[Array, "batch time"]:
    """Numbers computed *after* each position, moved to the token they speak about.

    What is computed at position ``t - 1`` speaks about token ``t``; the first token gets 0.
    """
    whole = join_shards(after, mesh.tp).reshape(shape)
    return jnp.concatenate([jnp.zeros_like(whole[:, :1]), whole[:, :-1]], axis=1)


def next_tokens(tokens: Tokens, mesh: FoldedMesh) -> Int[Array, "local"]:
    """The token that follows each position, this rank's shard; the last position wraps to the first."""
    return own_shard(jnp.roll(tokens, -1, axis=1).reshape(-1), mesh.tp)


def values(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """The critic's estimate of the state before each token (0 before the first)."""
    if config.head != "value" or weights.head is None:
        raise ValueError(f'head={config.head!r} gives no values: the critic has head="value".')
    x, stats = hidden(weights, tokens, valid, config, mesh)
    after = x.astype(jnp.float32) @ weights.head
    return align_to_tokens(after, tokens.shape, mesh), stats


def router_loss(
    stats: RouterStatistics[Array] | None,
    config: ModelConfig,
    mesh: FoldedMesh,
    num_tokens: Int[Array, ""],
) -> Float[Array, ""]:
    """``load_balance_coef * balance + router_z_coef * z`` of the tokens of this sequence-parallel group.

    Its sum over the other mesh axes and over micro-batches is the loss of the whole batch, a mean over
    tokens and layers.

    Args:
      stats: this device's sums; None without experts, where the loss is 0.
      num_tokens: valid tokens of the whole batch.
    """
    if stats is None:
        return jnp.zeros((), jnp.float32)
    weighted = config.load_balance_coef * stats.balance + config.router_z_coef * stats.z
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    return all_sum(weighted, mesh.tp) / (tokens * config.num_layers)


def _check_divides(num_tokens: int, mesh: FoldedMesh) -> None:
    if num_tokens % mesh.size(mesh.tp):
        raise ValueError(
            f"{num_tokens} tokens per data-parallel rank cannot be split over tp="
            f"{mesh.size(mesh.tp)}: choose a batch or a length that divides."
        )
    for axis in ("cp", "pp", "etp"):
        if getattr(mesh.layout, axis) > 1:
            raise ValueError(
                f"layout {mesh.layout}: the model runs on dp, tp and ep; {axis} must be 1."
            )
