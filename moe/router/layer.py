"""Router of a layer: routing of its tokens, dropping, and statistics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moe.config import ModelConfig
from moe.implementations import selected_implementation
from moe.precision import float32_product
from moe.remat import ROUTED
from moe.router.balance import compares_batches, load_fractions
from moe.router.capacity import drop
from moe.router.routing import Routing, agreement, assignments, counted_routing, topk_routing
from moe.router.statistics import LoadFractions, RouterStatistics, statistics
from moe.tokens.packing import PackedBatch
from moe.tokens.sequences import sequence_load_fractions
from moe.weights import Experts
from sharding.collectives import local_shard, vary
from sharding.folding import FoldedMesh


def route(
    experts: Experts[Array],
    h: Float[Array, "local d_model"],
    packed: PackedBatch,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Routing, RouterStatistics[Array]]:
    """Routing of each token after dropping, and the router's statistics."""
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
        implementation=selected_implementation(config, "router", mesh),
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
        stats = statistics(
            logits,
            probabilities,
            load,
            LoadFractions(fractions),
            multiplicity,
            config,
            with_mass=compares_batches(config),
        )
    else:
        compared = load_fractions(fractions, load, config, mesh)
        stats = statistics(logits, probabilities, load, compared, multiplicity, config)
    remaining, dropped = drop(routing, packed.zigzag, config, mesh)
    choices = routing.experts if packed.record_choices else None
    return remaining, replace(
        stats,
        dropped=float32_product(multiplicity, dropped),
        agreed=agreed,
        replayed=replayed,
        choices=choices,
    )
