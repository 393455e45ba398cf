"""The router of a layer: where its tokens go, what is dropped, and the statistics of both."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.config import ModelConfig
from moe.precision import float32_product
from moe.router.balance import shares
from moe.router.capacity import drop
from moe.router.routing import Routing, assignments, route
from moe.router.statistics import RouterStatistics, statistics
from moe.tokens.packing import Stream
from moe.weights import Experts
from sharding.collectives import gather_tokens, own_shard, vary
from sharding.folding import FoldedMesh


def choose(
    experts: Experts[Array],
    h: Float[Array, "local d_model"],
    stream: Stream,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Routing, RouterStatistics[Array]]:
    """Where each token goes, full experts left out, and what the router did."""
    weight = vary(own_shard(stream.weight, mesh.sequence), mesh.axes)
    replay = stream.replay if stream.replay is None else own_shard(stream.replay, mesh.sequence)
    logits = float32_product(h.astype(jnp.float32), experts.router)
    routing, probabilities = route(logits, weight > 0, config, bias=experts.bias, replay=replay)
    counts = jax.lax.stop_gradient(assignments(routing.experts, config.num_experts))
    share = own_shard(stream.share(gather_tokens(counts, mesh.sequence)), mesh.sequence)
    compared = shares(share, float32_product(weight, counts), config, mesh)
    stats = statistics(logits, probabilities, counts, compared, weight, config)
    kept, dropped = drop(routing, stream.order, config, mesh)
    choices = routing.experts if stream.record else None
    return kept, replace(stats, dropped=float32_product(weight, dropped), choices=choices)
