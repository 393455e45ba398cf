"""Scoring passes over packed rows: the scores of `jrl.trainer.scoring`, of tokens in the mask
only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch, required
from jrl.rollout.batching import replicated, take_rows
from jrl.rollout.scoring import mark_replicated
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective
from jrl.trainer.learner.overflow import retry_on_overflow
from jrl.trainer.learner.passes import scan_first
from jrl.trainer.packed.plan import counts_of, pack_rows, plan
from moe import model, placement
from moe.router.statistics import overflow_of
from moe.weights import Transformer


@retry_on_overflow(num_static=2)
def _score_packed(
    objective: CriticObjective | PolicyObjective,
    num_micro_batches: int,
    weights: Transformer[Array],
    rows: Batch[Array],
    passes: Array,
) -> tuple[tuple[Array, ...], Array | None]:
    """Critic values, or log-probabilities in the full policy and in the distribution sampled
    from."""
    config, mesh = objective.config, objective.mesh

    # The networks differ only in what is computed from the last states.
    def outputs(weights: Transformer[Array], x: Array, rows: Batch[Array]) -> tuple[Array, ...]:
        if isinstance(objective, CriticObjective):
            return (objective.values(weights, x, rows),)
        scores = objective.scores(weights, x, rows)
        return scores.logprobs, scores.behaviour_logprobs

    def local(weights, rows, passes):
        # No carry: without a gradient there is nothing to sum over micro-batches.
        def score_micro_batch(_, micro_batch):
            x, router = model.run(weights, objective.pack(micro_batch), config, mesh)
            return (), (
                mark_replicated(outputs(weights, x, micro_batch), mesh),
                overflow_of(router, config),
            )

        # Slots of a micro-batch are contiguous, so that a reshape splits them.
        micro_batches = jax.tree.map(lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), rows)
        _, (results, overflow) = scan_first(score_micro_batch, (), micro_batches, passes)
        # Micro-batches that `passes` skipped are zeros, and have no row.
        scores_of_rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        # Summed over passes: an overflow in one recomputes all of them.
        return scores_of_rows, None if overflow is None else jnp.sum(overflow)

    row_spec = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), row_spec, PartitionSpec()),
        out_specs=(row_spec, PartitionSpec()),
    )(weights, rows, passes)


def packed_scores(
    objective: CriticObjective | PolicyObjective,
    weights: Transformer[Array],
    batch: Batch[Array],
    bins: int,
) -> list[Array]:
    """Critic values, or log-probabilities as of `logprobs_of`, of the tokens in the mask, by passes
    over packed rows; all others get 0."""
    mesh = objective.mesh
    # Only the arrays that the pass reads: rows move between devices on their way into bins.
    batch = Batch(batch.tokens, batch.valid, batch.mask, choices=batch.choices)
    num_rows, time = batch.tokens.shape
    # This batch has only one mask, for either network; rows without any token in it are left out.
    tokens, loss_tokens = counts_of(batch).for_network("actor", np.arange(num_rows), idle=False)
    plan_of_batch = plan(tokens, loss_tokens, time, bins, mesh)
    rows = pack_rows(batch, plan_of_batch, mesh)
    # In the static argument, as sizes are shapes; `passes` is an array, without recompilation.
    objective = replace(objective, packed=plan_of_batch.sizes)
    passes = to_devices(np.int32(plan_of_batch.passes), replicated(mesh))
    packed_arrays = _score_packed(objective, plan_of_batch.num_micro_batches, weights, rows, passes)
    # `old_values` is used as a carrier, to gather them.
    # A row that is in no bin gets the values of an empty slot: zeros.
    slots = plan_of_batch.slots(num_rows)
    columns = [
        take_rows(replace(rows, old_values=x), slots, mesh).old_values for x in packed_arrays
    ]
    return [required(column) for column in columns]
