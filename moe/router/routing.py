"""Top-k routing: router scores, selected (or recorded, replayed) experts and gate weights of each
token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from moe.config import ModelConfig
from moe.kernels import routing as kernel
from moe.ops.precision import float32_product
from moe.remat import ROUTED


class Routing(NamedTuple):
    """Expert ids and gate weights of each token.

    Attributes:
      experts: ``[token, k]`` expert ids; `num_experts` (one past the last) for padding and for
        dropped ones.
      probs: ``[token, k]`` gate weights, which multiply the experts' outputs (Megatron's probs,
        DeepEP's ``topk_weights``), float32; 0 for padding and for dropped ids.
    """

    experts: Array
    probs: Array


def topk_routing(
    logits: Float[Array, "token route"],
    valid: Bool[Array, "token"],
    config: ModelConfig,
    *,
    bias: Float[Array, "route"] | None = None,
    replay: Integer[Array, "token k"] | None = None,
) -> tuple[Routing, Float[Array, "token route"]]:
    """Selects `experts_per_token` experts for each token.

    Scores, in float32, are ``softmax(logits)`` or ``sigmoid(logits)``. The selected experts are
    those with the largest ``score + bias`` (in the groups that are selected first, if experts are
    grouped). Their gate weights are the scores without the bias, divided by their sum over the
    selected ones if `renormalise`, times `routed_scaling`. Padding has no experts.

    Args:
      logits: router logits.
      valid: true for tokens, false for padding.
      bias: added to each expert's score for the selection; no gradient.
      replay: recorded expert ids, used instead of the router's selection, with the current scores.
        A token with an id out of ``0..num_experts - 1`` (it was padding then) is routed again; an
        expert id that occurs twice is used twice, in counts, weights and capacity.

    Returns:
      The routing, and the probabilities of all experts: scores that sum to 1.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 12 to 16 (sigmoid, bias, groups).
      https://arxiv.org/abs/2412.19437
    """
    logits = logits.astype(jnp.float32)
    probabilities = jax.nn.softmax(log_scores(logits, config), axis=-1)
    scores = probabilities if config.router_scores == "softmax" else jax.nn.sigmoid(logits)
    ranking = jax.lax.stop_gradient(logits if config.softmax_after_topk else scores)
    # The bias affects the selection and not the gate weights: it balances the load and gets no
    # gradient.
    if bias is not None:
        ranking = ranking + jax.lax.stop_gradient(bias)[None, :]
    if config.num_expert_groups > 1:
        ranking = jnp.where(_open_groups(ranking, config), ranking, -jnp.inf)
    _, experts = jax.lax.top_k(ranking, config.experts_per_token)
    if replay is not None:
        is_replayed = is_recorded(replay, config.num_experts)[:, None]
        experts = jnp.where(is_replayed, replay.astype(experts.dtype), experts)
    # Selected once: recomputation might select the other of two nearly equal scores.
    experts = checkpoint_name(experts, ROUTED)
    probs = _gate_weights(experts, scores, logits, config)
    return _mask_padding(experts, probs, valid, config), probabilities


def counted_routing(
    logits: Float[Array, "token route"],
    multiplicity: Float[Array, "token"],
    config: ModelConfig,
    *,
    bias: Float[Array, "route"] | None = None,
    implementation: str | None = None,
) -> tuple[Routing, Float[Array, "token route"], Float[Array, "route"] | None]:
    """`topk_routing` of the tokens that count, and the load of each expert if a kernel routes,
    which computes it anyway; else None.

    Args:
      multiplicity: weight of each token; 0 for padding.
      implementation: implementation of scores and selection, see `moe.kernels.choice`.
    """
    if implementation in (None, "plain"):
        return *topk_routing(logits, multiplicity > 0, config, bias=bias), None
    bias = jnp.zeros(config.num_experts) if bias is None else bias
    rule = kernel.Rule(
        k=config.experts_per_token,
        sigmoid=config.router_scores == "sigmoid",
        after_topk=config.softmax_after_topk,
        renormalise=config.renormalise,
        scaling=config.routed_scaling,
        groups=config.num_expert_groups,
        open_groups=config.expert_groups_per_token,
    )
    output = kernel.route(
        logits.astype(jnp.float32), bias, multiplicity, rule, implementation=implementation
    )
    routing = _mask_padding(output.experts, output.probs, multiplicity > 0, config)
    return routing, output.probabilities, output.counts


def _mask_padding(
    experts: Int[Array, "token k"],
    probs: Float[Array, "token k"],
    valid: Bool[Array, "token"],
    config: ModelConfig,
) -> Routing:
    """Routing with no experts for padding."""
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    return Routing(experts, jnp.where(valid[:, None], probs, 0.0))


def log_scores(
    logits: Float[Array, "token route"], config: ModelConfig
) -> Float[Array, "token route"]:
    """Numbers whose softmax is the router's distribution over all experts."""
    return logits if config.router_scores == "softmax" else jax.nn.log_sigmoid(logits)


def _open_groups(
    ranking: Float[Array, "token route"], config: ModelConfig
) -> Bool[Array, "token route"]:
    """Mask of the experts in the groups that a token may select from."""
    groups, topk_groups = config.num_expert_groups, config.expert_groups_per_token
    by_group = ranking.reshape(ranking.shape[0], groups, -1)
    best_scores, _ = jax.lax.top_k(by_group, config.experts_per_token // topk_groups)
    _, selected_groups = jax.lax.top_k(jnp.sum(best_scores, axis=-1), topk_groups)
    return jnp.repeat(assignments(selected_groups, groups) > 0, by_group.shape[-1], axis=1)


def _gate_weights(
    experts: Int[Array, "token k"],
    scores: Float[Array, "token route"],
    logits: Float[Array, "token route"],
    config: ModelConfig,
) -> Float[Array, "token k"]:
    if config.softmax_after_topk:
        probs = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
    elif not config.renormalise:
        probs = jnp.take_along_axis(scores, experts, axis=-1)
    elif config.router_scores == "sigmoid":
        # The softmax of their logarithms: scores that underflow still have a sum.
        selected_scores = jnp.take_along_axis(log_scores(logits, config), experts, axis=-1)
        probs = jax.nn.softmax(selected_scores, axis=-1)
    else:
        selected_scores = jnp.take_along_axis(scores, experts, axis=-1)
        probs = selected_scores / jnp.sum(selected_scores, axis=-1, keepdims=True)
    return probs * config.routed_scaling


def without_repeats(routing: Routing, num_experts: int) -> Routing:
    """The same routing with each expert id of a token once; the gate weights of repeats are summed.

    A router never repeats an expert; ids that were recorded elsewhere and are replayed may.
    """
    same = routing.experts[:, :, None] == routing.experts[:, None, :]
    first = jnp.argmax(same, axis=2)
    column = jnp.arange(first.shape[1])
    # [token, column, repeat]: an only choice is added to nothing but zeros and keeps its bits.
    is_first_column = first[:, None, :] == column[None, :, None]
    probs = jnp.sum(routing.probs[:, None, :], axis=2, where=is_first_column)
    return Routing(jnp.where(first == column[None], routing.experts, num_experts), probs)


def assignments(experts: Int[Array, "token k"], num_experts: int) -> Float[Array, "token expert"]:
    """1 if a token is sent to an expert, else 0, float32; ids out of range count nowhere."""
    return jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=1)


def choices_dtype(num_experts: int) -> np.dtype:
    """Smallest dtype of recorded expert ids, with `num_experts` for none."""
    return np.min_scalar_type(num_experts)


def is_recorded(replay: Integer[Array, "token k"], num_experts: int) -> Bool[Array, "token"]:
    """True for tokens with recorded expert ids: all of them are ids of experts."""
    return jnp.all((replay >= 0) & (replay < num_experts), axis=-1)


def agreement(
    selected: Int[Array, "token k"],
    replay: Integer[Array, "token k"],
    multiplicity: Float[Array, "token"],
    num_experts: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Agreement between recorded expert ids and those that the router selects by its own scores.

    A token's share is the fraction of the router's ``k`` experts that are recorded, in any order:
    ``|selected & recorded| / k``.

    Args:
      selected: expert ids that the router selects.
      replay: recorded expert ids.
      multiplicity: weight of each token; 0 for padding.

    Returns:
      The sum of these shares over the tokens that have a record, and the number of these tokens.
    """
    counted = jnp.where(is_recorded(replay, num_experts), multiplicity, 0.0)
    same = jnp.any(selected[:, :, None] == replay[:, None, :], axis=2)
    return float32_product(counted, jnp.mean(same.astype(jnp.float32), axis=1)), jnp.sum(counted)
