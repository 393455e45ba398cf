"""Router of a layer: routing of its tokens, dropping if an expert is full, and statistics.

A generated token shares its experts only with the other rows of its step; when it is scored again,
with all tokens of the batch. No capacity could drop the same expert ids in both, so generation
drops none. Where tokens are dropped, a policy scores its samples with another probability than it
sampled them with, and importance ratios differ from 1 before any update: `can_drop` detects it, and
`jrl.trainer.setup.setup.Setup` rejects such a network. Supervised training has no such ratio.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from moe.config import Model, ModelConfig
from moe.implementations import selected_implementation
from moe.ops.precision import float32_product
from moe.ops.sorting import positions_within
from moe.ops.zigzag import ZigzagLayout
from moe.remat import ROUTED
from moe.router.balance import compares_batches, load_fractions
from moe.router.routing import Routing, agreement, assignments, counted_routing, topk_routing
from moe.router.statistics import LoadFractions, RouterStatistics, statistics
from moe.tokens.packing import PackedBatch
from moe.tokens.sequences import sequence_load_fractions
from moe.weights import Experts
from sharding.collectives import gather_tokens, local_shard, vary


def capacity_of(zigzag: ZigzagLayout, model: Model) -> int | None:
    """``C = min(T, ceil(capacity_factor T k / E))``: largest number of tokens of one expert; None
    is any number.

    ``T`` is the number of positions of `drop_scope`, padding included: the positions of one device,
    or of the rows of all devices of ``cp x tp``. Padding that packing adds to rows that ``cp`` does
    not divide counts in the first and not in the second, which is the same for every ``cp``.

    Args:
      zigzag: layout of the tokens of one sequence-parallel group.

    References:
      Liu et al., "MoE Parallel Folding", 2025, section 3.3 (sub-sequence and full-sequence
      dropping). https://arxiv.org/abs/2504.14960
    """
    config = model.config
    if config.capacity_factor is None:
        return None
    if config.drop_scope == "full_sequence":
        scope = sum(rows * length for rows, length in zigzag.sections)
    else:
        scope = zigzag.num_tokens // model.mesh.size(model.mesh.sequence)
    # A product that is an integer up to rounding counts as that integer.
    average = config.capacity_factor * scope * config.experts_per_token / config.num_experts
    return min(scope, math.ceil(round(average, 9)))


def drop(routing: Routing, zigzag: ZigzagLayout, model: Model) -> tuple[Routing, Array]:
    """Drops the expert ids beyond an expert's capacity; the gate weights of the others stay.

    With ``drop_policy="probs"`` an expert keeps its largest probs, equal ones by position; with
    "position" the probs of the tokens that come first. With ``drop_scope="full_sequence"`` that is
    row after row of each section, each from its start, wherever ``cp`` and ``tp`` hold the tokens:
    what is dropped does not depend on them. With "sub_sequence" it is the order of the device's own
    part.

    Communication per device and layer: none, or with ``drop_scope="full_sequence"`` one
    `gather_tokens` over ``cp x tp`` of the ids and, for "probs", one of the probs, ``T k
    (n - 1)`` numbers each.

    Args:
      routing: routing of the tokens of this device.
      zigzag: layout of the tokens of the batch.

    Returns:
      The routing that is left, and ``[token]`` the number of dropped expert ids of each token.
    """
    config = model.config
    capacity = capacity_of(zigzag, model)
    if capacity is None:
        return routing, jnp.zeros_like(routing.probs[:, 0])
    if config.drop_scope == "full_sequence":
        gathered = _gather_routing(routing, model)
        retained = _within_capacity_in_rows(gathered, zigzag, capacity, config)
        retained = local_shard(retained, model.mesh.sequence)
    else:
        retained = _within_capacity(routing, capacity, config)
    retained = checkpoint_name(retained, ROUTED)
    dropped = ~retained & (routing.experts < config.num_experts)
    return Routing(
        jnp.where(retained, routing.experts, config.num_experts),
        jnp.where(retained, routing.probs, 0.0),
    ), jnp.sum(dropped.astype(jnp.float32), axis=1)


def _gather_routing(routing: Routing, model: Model) -> Routing:
    """All-gathers the routing of the sequence-parallel group, for comparisons only."""
    experts = gather_tokens(routing.experts, model.mesh.sequence)
    if model.config.drop_policy == "position":
        return Routing(experts, jnp.zeros(experts.shape))
    return Routing(experts, gather_tokens(lax.stop_gradient(routing.probs), model.mesh.sequence))


def _within_capacity_in_rows(
    routing: Routing, zigzag: ZigzagLayout, capacity: int, config: ModelConfig
) -> Bool[Array, "token k"]:
    """`_within_capacity` of a whole packed batch, ranked in the order that its rows have on one
    device."""
    plain = ZigzagLayout(zigzag.sections, ranks=1)
    row_routing = Routing(*(plain.flatten(*zigzag.restore(x)) for x in routing))
    return zigzag.flatten(*plain.restore(_within_capacity(row_routing, capacity, config)))


def _within_capacity(
    routing: Routing, capacity: int, config: ModelConfig
) -> Bool[Array, "token k"]:
    experts = routing.experts.reshape(-1)
    if config.drop_policy == "position":
        rank, _ = positions_within(experts, config.num_experts)
    else:
        rank = _rank_by_prob(experts, routing.probs.reshape(-1), config.num_experts)
    return ((rank < capacity) & (experts < config.num_experts)).reshape(routing.experts.shape)


def _rank_by_prob(
    experts: Int[Array, "choice"], probs: Float[Array, "choice"], num_experts: int
) -> Int[Array, "choice"]:
    """Rank of each choice among the choices of its expert, the largest gate weight first."""
    order = jnp.argsort(-lax.stop_gradient(probs), stable=True)
    position, _ = positions_within(experts[order], num_experts)
    return jnp.zeros_like(position).at[order].set(position)


def route(
    experts: Experts[Array], h: Float[Array, "local d_model"], packed: PackedBatch, model: Model
) -> tuple[Routing, RouterStatistics[Array]]:
    """Routing of each token after dropping, and the router's statistics."""
    config, mesh = model.config, model.mesh
    multiplicity = vary(local_shard(packed.multiplicity, mesh.sequence), mesh.axes)
    logits = float32_product(h.astype(jnp.float32), experts.router)
    if experts.router_bias is not None:
        logits = logits + experts.router_bias[None]
    logits = checkpoint_name(logits, ROUTED)
    routing, probabilities, load = counted_routing(
        logits,
        multiplicity,
        config,
        bias=experts.bias,
        implementation=selected_implementation(model, "router"),
    )
    agreed = replayed = None
    if packed.replay is not None:
        replay = local_shard(packed.replay, mesh.sequence).astype(jnp.int32)
        agreed, replayed = agreement(routing.experts, replay, multiplicity, config.num_experts)
        routing, probabilities = topk_routing(
            logits, multiplicity > 0, config, bias=experts.bias, replay=replay
        )
        load = None
    fractions = None
    if load is None or packed.sequences is not None:
        counts = jax.lax.stop_gradient(assignments(routing.experts, config.num_experts))
        if load is None:
            load = float32_product(multiplicity, counts)
        if packed.sequences is not None:
            fractions = sequence_load_fractions(counts, packed.sequences, mesh)
    if packed.is_half_batch:
        # Only the losses that use the load of all tokens wait for the other half.
        compared, with_mass = LoadFractions(fractions), compares_batches(config)
    else:
        compared, with_mass = load_fractions(fractions, load, model), False
    stats = statistics(logits, probabilities, load, compared, multiplicity, config, with_mass)
    remaining, dropped = drop(routing, packed.zigzag, model)
    choices = routing.experts if packed.record_choices else None
    return remaining, replace(
        stats,
        dropped=float32_product(multiplicity, dropped),
        agreed=agreed,
        replayed=replayed,
        choices=choices,
    )
