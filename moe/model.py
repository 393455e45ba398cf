"""The forward pass: functions over the weight records, run inside one `jax.shard_map`.

Sequences are spread over ``dp``; within a sequence-parallel group the flattened tokens are spread
over ``tp``. The same block serves training and decoding: they differ in `attend`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention import Attend, attention, rms_norm
from moe.config import ModelConfig
from moe.dispatch import dispatch
from moe.experts import dense
from moe.routing import RouterStatistics, assignments, route, statistics
from moe.stream import Stream, rows, shared_prompts
from moe.weights import Layer, Transformer
from sharding.collectives import all_sum, gather_tokens, join_shards, own_shard, vary
from sharding.folding import FoldedMesh

Tokens = Int[Array, "batch time"]
Valid = Bool[Array, "batch time"]


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
    stream: Stream,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The feed-forward term of a block: routed experts, the dense or shared expert, or both.

    Args:
      x: the residual stream, this rank's shard.
      stream: all the gathered tokens; padding is never routed and never counted.
    """
    h = rms_norm(x, layer.norm, config.norm_epsilon)
    out, stats = jnp.zeros_like(h), None
    if layer.experts is not None:
        weight = vary(own_shard(stream.weight, mesh.tp), mesh.axes)
        logits = h.astype(jnp.float32) @ layer.experts.router
        routing, probabilities = route(logits, weight > 0, config)
        counts = assignments(routing.experts, config.num_experts)
        share = stream.share(gather_tokens(jax.lax.stop_gradient(counts), mesh.tp))
        stats = statistics(logits, probabilities, counts, own_shard(share, mesh.tp), weight)
        out = out + dispatch(layer.experts, h, routing, mesh)
    if layer.dense is not None:
        out = out + dense(layer.dense, h, mesh)
    return out, stats


def block(
    layer: Layer[Array],
    x: Float[Array, "local d_model"],
    stream: Stream,
    attend: Attend,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """One pre-norm block."""
    x = x + attention(layer.attention, x, stream.positions, attend, config, mesh)
    out, stats = feed_forward(layer, x, stream, config, mesh)
    return x + out, stats


def run(
    weights: Transformer[Array], stream: Stream, config: ModelConfig, mesh: FoldedMesh
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The normalised last residual stream at every token, this rank's shard.

    All layers are on this device; `moe.stages` runs those of a pipeline.

    Returns:
      The hidden states and, with experts, the router's sums over layers on this device, `load`
      with a row per layer.
    """
    _check_whole(mesh)
    check_runs(stream.tokens.shape[0], mesh)
    x = embed(weights, stream.tokens, config, mesh)
    x, stats = blocks(weights.layers, x, stream, config, mesh)
    return last_norm(weights, x, config), stats


def blocks(
    layers: Layer[Array],
    x: Float[Array, "local d_model"],
    stream: Stream,
    config: ModelConfig,
    mesh: FoldedMesh,
    first: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The residual stream after a stack of layers, and the router's sums over them, `load` with a
    row per layer.

    Args:
      layers: any number of consecutive layers.
      first: the number of the first of them in the network.
    """
    collected = []
    for index in range(jax.tree.leaves(layers)[0].shape[0]):
        layer = jax.tree.map(lambda stacked, index=index: stacked[index], layers)
        attend = stream.attend_in_layer(first + index)
        x, stats = block(layer, x, stream, attend, config, mesh)
        collected.append(stats)
    if config.num_experts == 0:
        return x, None
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *collected)
    return x, replace(total, load=jnp.stack([stats.load for stats in collected]))


def last_norm(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local d_model"]:
    """The normalised residual stream, as the heads read it."""
    return rms_norm(x, weights.norm, config.norm_epsilon)


def hidden(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """`run` on the rows of this ``dp`` rank.

    Args:
      tokens: ids.
      valid: which of them are not padding.
    """
    return run(weights, rows(tokens, valid), config, mesh)


def before_responses(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    prompt_length: int,
    copies: int,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The hidden state that each response token was predicted from, this rank's shard.

    Prompts run once for the rows that share them, and the head sees no prompt but its last token.
    The plain twin is `hidden`, shifted by one.

    Args:
      tokens: ids; each run of `copies` rows has the same prompt.
      valid: which of them are not padding.
      prompt_length: columns of the prompt.

    Returns:
      States of the flattened ``[batch, response]`` tokens, and the router's sums.
    """
    x, stats = run(weights, shared_prompts(tokens, valid, prompt_length, copies), config, mesh)
    return responses_of(x, tokens.shape[0], prompt_length, copies, mesh), stats


def responses_of(
    x: Float[Array, "local d_model"],
    num_rows: int,
    prompt_length: int,
    copies: int,
    mesh: FoldedMesh,
) -> Float[Array, "before d_model"]:
    """Of the states at a stream of `shared_prompts`, the one each response token was predicted
    from."""
    x = gather_tokens(x, mesh.tp)
    split = num_rows // copies * prompt_length
    last_of_prompt = x[:split].reshape(-1, prompt_length, x.shape[-1])[:, -1:]
    within = x[split:].reshape(num_rows, -1, x.shape[-1])[:, :-1]
    before = jnp.concatenate([jnp.repeat(last_of_prompt, copies, axis=0), within], axis=1)
    return own_shard(before.reshape(-1, x.shape[-1]), mesh.tp)


def layer_of(weights: Transformer[Array], index: int) -> Layer[Array]:
    """The weights of one layer out of the stack."""
    return jax.tree.map(lambda stacked: stacked[index], weights.layers)


def logits_of(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local vocab"]:
    """Scores of the next token, float32."""
    if config.head == "value":
        raise ValueError('head="value" has no logits: this is a critic; use `values`.')
    head = weights.embedding.T if weights.head is None else weights.head
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
    after: Float[Array, "local"], shape: tuple[int, ...], mesh: FoldedMesh
) -> Float[Array, "batch time"]:
    """Numbers computed *after* each position, moved to the token they speak about.

    What is computed at position ``t - 1`` speaks about token ``t``; the first token gets 0.
    """
    whole = join_shards(after, mesh.tp).reshape(shape)
    return jnp.concatenate([jnp.zeros_like(whole[:, :1]), whole[:, :-1]], axis=1)


def next_tokens(tokens: Tokens, mesh: FoldedMesh) -> Int[Array, "local"]:
    """The token that follows each position, this rank's shard; the last position wraps to the
    first."""
    return own_shard(jnp.roll(tokens, -1, axis=1).reshape(-1), mesh.tp)


def on_responses(
    before: Float[Array, "local"], shape: tuple[int, ...], prompt_length: int, mesh: FoldedMesh
) -> Float[Array, "batch time"]:
    """Numbers about the flattened response tokens, put in their columns; prompts get 0."""
    response = join_shards(before, mesh.tp).reshape(shape[0], -1)
    return jnp.pad(response, ((0, 0), (prompt_length, 0)))


def values(
    weights: Transformer[Array],
    tokens: Tokens,
    valid: Valid,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """The critic's estimate of the state before each token (0 before the first)."""
    x, stats = hidden(weights, tokens, valid, config, mesh)
    return align_to_tokens(value_of(weights, x, config), tokens.shape, mesh), stats


def value_of(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local"]:
    """The value of each state, float32."""
    if config.head != "value" or weights.head is None:
        raise ValueError(f'head={config.head!r} gives no values: the critic has head="value".')
    return x.astype(jnp.float32) @ weights.head


def router_loss(
    stats: RouterStatistics[Array] | None,
    config: ModelConfig,
    mesh: FoldedMesh,
    num_tokens: Int[Array, ""],
) -> Float[Array, ""]:
    """``load_balance_coef * balance + router_z_coef * z`` of the tokens of this sequence-parallel
    group.

    Its sum over the other mesh axes and over micro-batches is the loss of the whole batch, a mean
    over tokens and layers.

    Args:
      stats: this device's sums; None without experts, where the loss is 0.
      num_tokens: valid tokens of the whole batch.
    """
    if stats is None:
        return jnp.zeros((), jnp.float32)
    weighted = config.load_balance_coef * stats.balance + config.router_z_coef * stats.z
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    return all_sum(weighted, mesh.tp) / (tokens * config.num_layers)


def check_runs(num_tokens: int, mesh: FoldedMesh) -> None:
    """Refuses a number of tokens, or a layout, that the network does not run on."""
    if num_tokens % mesh.size(mesh.tp):
        raise ValueError(
            f"{num_tokens} tokens per data-parallel rank cannot be split over tp="
            f"{mesh.size(mesh.tp)}: choose a batch or a length that divides."
        )
    for axis in ("cp", "etp"):
        if getattr(mesh.layout, axis) > 1:
            raise ValueError(
                f"layout {mesh.layout}: the model runs on dp, tp, ep and pp; {axis} must be 1."
            )


def _check_whole(mesh: FoldedMesh) -> None:
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} cuts the layers into pipeline stages, and what is asked for "
            "runs them all on one device: scoring and training go through a pipeline, decoding "
            "needs a layout with pp=1."
        )
