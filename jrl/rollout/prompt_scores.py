"""Log-probabilities of prompts: each token given those before it (teacher forcing), in one forward
pass over packed rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.rollout.decoding.packed_prefill import Packing, make_packing, plan_rows
from jrl.rollout.decoding.scheduler import AdmissionPlan
from jrl.rollout.decoding.slots import Decoder, TopTokens, over_slots
from jrl.rollout.sampling import logprobs_of
from moe import model
from moe.head import logits_of
from moe.model import for_prefill
from moe.placement import specs
from moe.router.statistics import overflow_of
from moe.tokens.packing import pack_segments
from moe.weights import Transformer
from sharding.collectives import join_shards, local_shard, vary
from sharding.sharded_jit import MeshJit

Leaf = TypeVar("Leaf")

MAX_CHUNK = 64
"""Tokens whose logits over the vocabulary are in memory at a time."""


@struct.dataclass
class PackedScores(Generic[Leaf]):
    """Log-probabilities of the tokens of prompts in packed rows; the value of a prompt's first
    token is arbitrary.

    Attributes:
      logprobs: ``[row, width]`` log-probabilities in the policy at temperature 1, nats.
      top_tokens: ``[row, width, k]`` top-k tokens of each position; None if not requested.
    """

    logprobs: Leaf
    top_tokens: TopTokens[Leaf] | None


PromptScores = PackedScores[np.ndarray]
"""Scores of one prompt from its second token on, ``[token - 1]``."""


def score_prompts(
    run: Callable[[Packing[np.ndarray], bool], PackedScores[np.ndarray]],
    prompts: Sequence[np.ndarray],
    *,
    widths: Sequence[int],
    ranks: int,
    pad_id: int,
    needs_top_tokens: bool,
) -> list[PromptScores]:
    """Scores prompts in one pass.

    Args:
      run: runs packed rows on the devices, with or without top tokens.
      prompts: ids of each, none longer than the last of `widths`.
      widths: allowed widths of rows (`jrl.rollout.decoding.sizes.row_widths`).
      ranks: ranks that share the rows.
    """
    plan, placed = AdmissionPlan([[] for _ in range(ranks)]), list[tuple[int, int]]()
    for ids in prompts:
        rank = min(range(ranks), key=lambda rank: sum(map(len, plan.runs[rank])))
        placed.append((rank, len(plan.runs[rank])))
        plan.runs[rank].append(ids)
    rows = plan_rows(plan, widths)
    packed = run(make_packing(rows, plan, ranks, pad_id), needs_top_tokens)
    by_rank = jax.tree.map(
        lambda x: x.reshape(ranks, rows.num_rows * rows.width, *x.shape[2:]), packed
    )
    scores = []
    for ids, (rank, index) in zip(prompts, placed, strict=True):
        start = rows.starts[rank][index]
        span = slice(start + 1, start + len(ids))
        scores.append(jax.tree.map(lambda x, at=(rank, span): np.array(x[at]), by_rank))
    return scores


@partial(MeshJit, static_argnums=(0, 1))
def score_packed(
    decoder: Decoder, top: int, weights: Transformer[Array], packing: Packing[Array]
) -> tuple[PackedScores[Array], Array | None]:
    """Scores the tokens of packed rows.

    Args:
      top: number of top tokens of each position; 0 returns none.

    Returns:
      The scores, and the overflow of the expert buffers: unless it is 0 or None, call this again
      with dropless buffers.
    """
    mesh, rows = decoder.mesh, over_slots(decoder.mesh)
    return jax.shard_map(
        partial(_score_local, decoder, top),
        mesh=mesh.mesh,
        in_specs=(specs(decoder.config, mesh), rows),
        out_specs=(rows, PartitionSpec()),
    )(weights, packing)


def _score_local(
    decoder: Decoder, top: int, weights: Transformer[Array], packing: Packing[Array]
) -> tuple[PackedScores[Array], Array | None]:
    config, mesh = for_prefill(decoder.config), decoder.mesh
    # Scanned over layers, as in packed prefill: there are many sizes of rows.
    config = replace(config, execution=replace(config.execution, scan_layers=True))
    num_tokens = packing.tokens.size
    packed = pack_segments(
        packing.tokens, packing.segments, num_tokens, mesh, config, positions=packing.positions
    )._replace(sequences=None)  # nothing is trained
    weights = vary(weights, mesh.axes)
    x, router = model.run(weights, packed, config, mesh)
    (states,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    # The state of a token predicts the next one.
    before = jnp.roll(states.reshape(num_tokens, -1), 1, axis=0)
    tokens = vary(packing.tokens.reshape(-1), mesh.axes)
    local = local_shard(before, mesh.sequence), local_shard(tokens, mesh.sequence)
    num_local = local[1].shape[0]
    chunk = next(size for size in range(MAX_CHUNK, 0, -1) if num_local % size == 0)

    def score(inputs: tuple[Array, Array]) -> PackedScores[Array]:
        logits, tokens = logits_of(weights, inputs[0], config, mesh), inputs[1]
        top_tokens = None
        if top:
            best, ids = lax.top_k(logits, top)
            total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            top_tokens = TopTokens(ids.astype(jnp.int32), best - total)
        return PackedScores(logprobs_of(logits, tokens), top_tokens)

    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), local)
    scores = lax.map(score, chunks)
    shape = packing.tokens.shape

    def in_rows(values: Array) -> Array:
        values = join_shards(values.reshape(num_local, *values.shape[2:]), mesh.sequence)
        return values.reshape(*shape, *values.shape[1:])

    return jax.tree.map(in_rows, scores), overflow_of(router, config)
