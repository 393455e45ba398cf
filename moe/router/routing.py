"""The router: which experts each token is sent to, with which weights, and how even that is."""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from moe.config import ModelConfig
from moe.precision import float32_product

Leaf = TypeVar("Leaf")


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
      experts: ``[token, k]`` expert ids; `num_experts` (one past the last) for a token that is
        padding, and for a choice that was dropped.
      weights: ``[token, k]`` weights of the experts' outputs, float32; 0 for padding and for what
        was dropped.
    """

    experts: Array
    weights: Array


class Shares(NamedTuple):
    """The share of assignments that each expert got, ``[token, route]`` or ``[route]``.

    Attributes:
      sequence: among the tokens of the same sequence.
      batch: among the tokens of the micro-batch in this sequence-parallel group; None where its
        loss has no weight.
      everywhere: among the tokens of the micro-batch on all devices; None likewise.
    """

    sequence: Array
    batch: Array | None = None
    everywhere: Array | None = None


@struct.dataclass
class RouterStatistics(Generic[Leaf]):
    """Sums over tokens from which the router's losses and its load are computed.

    Every field but `choices` adds up over micro-batches and devices.

    Attributes:
      load: ``[route]`` assignments that each expert was chosen for, dropped ones included;
        ``[layer, route]`` for a whole network.
      tokens: ``[]`` tokens routed.
      balance: ``[]`` sum over sequences of the load-balancing loss times the tokens of the
        sequence.
      batch_balance: ``[]`` the same, taken over this group's micro-batch at once; 0 where its
        coefficient is.
      global_balance: ``[]`` the same, taken over the micro-batch of all devices at once; 0 where
        its coefficient is.
      z: ``[]`` sum over tokens of the squared logsumexp of the logits.
      entropy: ``[]`` sum over tokens of the entropy of the router's distribution, in nats.
      dropped: ``[]`` assignments left out because their expert was full.
      places: ``[]`` places in the stream; a prompt that several rows share has them once.
      padded: ``[]`` those without a token.
      choices: ``[token, k]`` expert ids before dropping, ``[layer, token, k]`` for a whole network;
        None where they were not asked for (`moe.model.routing_choices`).
    """

    load: Leaf
    tokens: Leaf
    balance: Leaf
    batch_balance: Leaf
    global_balance: Leaf
    z: Leaf
    entropy: Leaf
    dropped: Leaf
    places: Leaf
    padded: Leaf
    choices: Leaf | None = None


def route(
    logits: Float[Array, "token route"],
    valid: Bool[Array, "token"],
    config: ModelConfig,
    *,
    bias: Float[Array, "route"] | None = None,
    replay: Int[Array, "token k"] | None = None,
) -> tuple[Routing, Float[Array, "token route"]]:
    """Sends each token to `experts_per_token` experts.

    Scores, in float32, are ``softmax(logits)`` or ``sigmoid(logits)``. The experts chosen are those
    with the largest ``score + bias`` (of the groups chosen first, where experts are grouped); their
    weights are the scores without the bias, divided by their sum over the chosen if `renormalise`,
    times `routed_scaling`. Padding is sent nowhere.

    Args:
      logits: of the router.
      valid: what is not padding.
      bias: of each expert's selection; no gradient.
      replay: choices made before, used in place of the router's own while scores stay the current
        ones. A token with an id out of ``0..num_experts - 1`` (it was padding then) chooses anew;
        an expert that it names twice is chosen twice, and counts, weighs and fills up as such.

    Returns:
      The routing, and the probabilities of all experts: scores that sum to 1.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 12 to 16 (sigmoid, bias, groups).
      https://arxiv.org/abs/2412.19437
    """
    logits = logits.astype(jnp.float32)
    probabilities = jax.nn.softmax(log_scores(logits, config), axis=-1)
    scores = probabilities if config.router_scores == "softmax" else jax.nn.sigmoid(logits)
    wanted = jax.lax.stop_gradient(logits if config.softmax_after_topk else scores)
    if bias is not None:
        wanted = wanted + jax.lax.stop_gradient(bias)[None, :]
    if config.num_expert_groups > 1:
        wanted = jnp.where(_open_groups(wanted, config), wanted, -jnp.inf)
    _, experts = jax.lax.top_k(wanted, config.experts_per_token)
    if replay is not None:
        known = jnp.all((replay >= 0) & (replay < config.num_experts), axis=-1, keepdims=True)
        experts = jnp.where(known, replay.astype(experts.dtype), experts)
    weights = _weights_of(experts, scores, logits, config)
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    return Routing(experts, jnp.where(valid[:, None], weights, 0.0)), probabilities


def log_scores(
    logits: Float[Array, "token route"], config: ModelConfig
) -> Float[Array, "token route"]:
    """Numbers whose softmax is the router's distribution over all experts."""
    return logits if config.router_scores == "softmax" else jax.nn.log_sigmoid(logits)


def _open_groups(
    wanted: Float[Array, "token route"], config: ModelConfig
) -> Bool[Array, "token route"]:
    """Which experts lie in the groups that a token may use."""
    groups, kept = config.num_expert_groups, config.expert_groups_per_token
    within = wanted.reshape(wanted.shape[0], groups, -1)
    best, _ = jax.lax.top_k(within, config.experts_per_token // kept)
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), kept)
    return jnp.repeat(assignments(chosen, groups) > 0, within.shape[-1], axis=1)


def _weights_of(
    experts: Int[Array, "token k"],
    scores: Float[Array, "token route"],
    logits: Float[Array, "token route"],
    config: ModelConfig,
) -> Float[Array, "token k"]:
    if config.softmax_after_topk:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    elif not config.renormalise:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    elif config.router_scores == "sigmoid":
        # The softmax of their logarithms: scores that underflow still have a sum.
        chosen = jnp.take_along_axis(log_scores(logits, config), experts, axis=-1)
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
    return weights * config.routed_scaling


def without_repeats(routing: Routing, num_experts: int) -> Routing:
    """The same routing with each expert of a token once, weighing what its repeats weigh together.

    A router never repeats an expert; choices that were recorded elsewhere and are replayed may.
    """
    same = routing.experts[:, :, None] == routing.experts[:, None, :]
    first = jnp.argmax(same, axis=2)
    column = jnp.arange(first.shape[1])
    # [token, column, repeat]: an only choice is added to nothing but zeros and keeps its bits.
    of_column = first[:, None, :] == column[None, :, None]
    weights = jnp.sum(routing.weights[:, None, :], axis=2, where=of_column)
    return Routing(jnp.where(first == column[None], routing.experts, num_experts), weights)


def assignments(experts: Int[Array, "token k"], num_experts: int) -> Float[Array, "token expert"]:
    """1 where a token is sent to an expert, float32; ids out of range count nowhere."""
    return jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=1)


def sequence_share(
    counts: Float[Array, "batch time route"], valid: Bool[Array, "batch time"]
) -> Float[Array, "batch route"]:
    """The share of a sequence's assignments that each expert got; sums to 1 over experts.

    A sequence without a valid token has shares of 0.
    """
    sent = jnp.sum(counts, axis=1, where=valid[..., None])
    return sent / jnp.maximum(jnp.sum(sent, axis=-1, keepdims=True), 1.0)


def statistics(
    logits: Float[Array, "token route"],
    probabilities: Float[Array, "token route"],
    counts: Float[Array, "token route"],
    shares: Shares,
    weight: Float[Array, "token"],
    config: ModelConfig,
) -> RouterStatistics[Array]:
    """Sums over tokens of what the router did, each token `weight` times (0 for padding).

    The load-balancing loss of a set of tokens is ``E sum_e f_e P_e``, ``f_e`` the share of its
    assignments that expert ``e`` got (`shares`, without gradient) and ``P_e`` the mean probability
    of ``e`` over its tokens: 1 when even, at most ``E``. Weighted by the tokens of the set it is a
    sum over tokens. Taken per sequence, it does not depend on how a batch is cut into
    micro-batches or spread over devices; taken over a micro-batch, it does.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 17 to 20. https://arxiv.org/abs/2412.19437
      Fedus et al., "Switch Transformers", 2021, eq. 4. https://arxiv.org/abs/2101.03961
      Qiu et al., "Demons in the Detail", 2025 (counts over all devices). https://arxiv.org/abs/2501.11873
      Zoph et al., "ST-MoE", 2022, eq. 5 (z-loss). https://arxiv.org/abs/2202.08906
    """
    logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    scores = log_scores(logits, config)
    log_scale = jax.nn.logsumexp(scores, axis=-1)
    entropy = -jnp.sum(probabilities * (scores - log_scale[:, None]), axis=-1)

    def total(per_token: Float[Array, "token *rest"]) -> Float[Array, "*rest"]:
        # Padding may hold anything: it is left out before it is multiplied.
        counted = (weight > 0).reshape(-1, *(1,) * (per_token.ndim - 1))
        return float32_product(weight, jnp.where(counted, per_token, 0.0))

    def balance(share: Array | None) -> Float[Array, ""]:
        if share is None:
            return jnp.zeros_like(weight, shape=())
        share = jnp.broadcast_to(jax.lax.stop_gradient(share), probabilities.shape)
        return total(probabilities.shape[-1] * jnp.sum(share * probabilities, -1))

    return RouterStatistics(
        load=total(counts),
        tokens=jnp.sum(weight),
        balance=balance(shares.sequence),
        batch_balance=balance(shares.batch),
        global_balance=balance(shares.everywhere),
        z=total(jnp.square(log_total)),
        entropy=total(entropy),
        dropped=jnp.zeros_like(weight, shape=()),
        places=jnp.sum(jnp.ones_like(weight)),
        padded=jnp.sum((weight == 0).astype(jnp.float32)),
    )
