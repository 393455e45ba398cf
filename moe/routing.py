"""The router: which experts each token is sent to, with which weights, and how even that is."""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from moe.config import ModelConfig

Leaf = TypeVar("Leaf")


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
      experts: ``[token, k]`` expert ids; `num_experts` (one past the last) for a token that is
        padding.
      weights: ``[token, k]`` weights of the experts' outputs, float32, summing to 1 over k; 0 for
        padding.
    """

    experts: Array
    weights: Array


@struct.dataclass
class RouterStatistics(Generic[Leaf]):
    """Sums over tokens from which the router's losses and its load are computed.

    Every field adds up over micro-batches and devices.

    Attributes:
      load: ``[route]`` assignments received by each expert, ``[layer, route]`` for a whole network.
      tokens: ``[]`` tokens routed.
      balance: ``[]`` sum over sequences of the load-balancing loss times the tokens of the
        sequence.
      z: ``[]`` sum over tokens of the squared logsumexp of the logits.
      entropy: ``[]`` sum over tokens of the entropy of the router's distribution, in nats.
    """

    load: Leaf
    tokens: Leaf
    balance: Leaf
    z: Leaf
    entropy: Leaf


def route(
    logits: Float[Array, "token route"], valid: Bool[Array, "token"], config: ModelConfig
) -> tuple[Routing, Float[Array, "token route"]]:
    """Sends each token to the `experts_per_token` likeliest experts.

    Softmax over all experts in float32, top-k, renormalised over the k chosen. Padding is sent
    nowhere.

    Returns:
      The routing, and the probabilities of all experts.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen, experts = jax.lax.top_k(probabilities, config.experts_per_token)
    weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    return Routing(experts, jnp.where(valid[:, None], weights, 0.0)), probabilities


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
    share: Float[Array, "token route"],
    weight: Float[Array, "token"],
) -> RouterStatistics[Array]:
    """Sums over tokens of what the router did, each token `weight` times (0 for padding).

    The load-balancing loss of a sequence is ``E sum_e f_e P_e``, ``f_e`` the share of its
    assignments that expert ``e`` got (`share`, the same row for every token of the sequence,
    without gradient) and ``P_e`` the mean probability of ``e`` over its tokens: 1 when even, at
    most ``E``. Taken per sequence and weighted by length it is a sum over tokens, so it does not
    depend on how a batch is cut into micro-batches or spread over devices.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 17 to 20. https://arxiv.org/abs/2412.19437
      Fedus et al., "Switch Transformers", 2021, eq. 4. https://arxiv.org/abs/2101.03961
      Zoph et al., "ST-MoE", 2022, eq. 5 (z-loss). https://arxiv.org/abs/2202.08906
    """
    logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    entropy = -jnp.sum(probabilities * (logits - log_total[:, None]), axis=-1)
    balance = probabilities.shape[-1] * jnp.sum(jax.lax.stop_gradient(share) * probabilities, -1)

    def total(per_token: Float[Array, "token *rest"]) -> Float[Array, "*rest"]:
        # Padding may hold anything: it is left out before it is multiplied.
        counted = (weight > 0).reshape(-1, *(1,) * (per_token.ndim - 1))
        return jnp.tensordot(weight, jnp.where(counted, per_token, 0.0), axes=1)

    return RouterStatistics(
        load=total(counts),
        tokens=jnp.sum(weight),
        balance=total(balance),
        z=total(jnp.square(log_total)),
        entropy=total(entropy),
    )
