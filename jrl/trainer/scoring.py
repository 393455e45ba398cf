"""Scoring passes: what policy, reference and critic say of completions, on global arrays."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch, given
from jrl.rollout.batching import take_rows
from jrl.rollout.generate import mark_replicated
from jrl.rollout.scoring import score, value
from jrl.trainer.objectives import CriticObjective, PolicyObjective
from jrl.trainer.packing import counts_of, place_rows, plan
from moe import model, placement
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@partial(jax.jit, static_argnums=0)
def values_of(
    objective: CriticObjective, critic: Transformer[Array], tokens: Array, valid: Array
) -> Array:
    """The critic's values of all response tokens."""
    config, mesh = objective.config, objective.mesh

    def local(critic, tokens, valid):
        return mark_replicated(
            value(critic, tokens, valid, objective.layout, config, mesh)[0], mesh
        )

    return _over_rows(local, config, mesh)(critic, tokens, valid)


@partial(jax.jit, static_argnums=0)
def logprobs_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens: in the whole policy, and in the
    distribution that tokens are drawn from."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = score(policy, tokens, valid, objective.layout, config, objective.sampling, mesh)
        return mark_replicated((scores.logprobs, scores.behaviour_logprobs), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


@partial(jax.jit, static_argnums=0)
def statistics_of(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> Any:
    """What the recipe's surrogate must know of a whole mini-batch, without a gradient."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = score(policy, tokens, valid, objective.layout, config, objective.sampling, mesh)
        return mark_replicated((scores.logprobs, scores.entropy), mesh)

    scored = _over_rows(local, config, mesh)(policy, batch.tokens, batch.valid)
    logprobs, entropy = scored
    return jax.lax.stop_gradient(objective.recipe.statistics(logprobs, entropy, batch))


def packed_values(
    objective: CriticObjective, critic: Transformer[Array], batch: Batch[Array]
) -> Array:
    """`values_of` of the tokens under the mask, by a pass over packed rows; all others get 0."""
    (values,) = _in_bins(_packed_values, objective, critic, batch)
    return values


def packed_logprobs(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> tuple[Array, Array]:
    """`logprobs_of` of the tokens under the mask, by a pass over packed rows; all others get 0."""
    logprobs, sampled = _in_bins(_packed_logprobs, objective, policy, batch)
    return logprobs, sampled


@partial(jax.jit, static_argnums=0)
def _packed_values(
    objective: CriticObjective, critic: Transformer[Array], rows: Batch[Array]
) -> tuple[Array]:
    config, mesh = objective.config, objective.mesh

    def local(critic, rows):
        x, _ = model.run(critic, objective.pack(rows), config, mesh)
        return mark_replicated((objective.values(critic, x, rows),), mesh)

    return _over_rows(local, config, mesh, 1)(critic, rows)


@partial(jax.jit, static_argnums=0)
def _packed_logprobs(
    objective: PolicyObjective, policy: Transformer[Array], rows: Batch[Array]
) -> tuple[Array, Array]:
    config, mesh = objective.config, objective.mesh

    def local(policy, rows):
        x, _ = model.run(policy, objective.pack(rows), config, mesh)
        scores = objective.scores(policy, x, rows)
        return mark_replicated((scores.logprobs, scores.behaviour_logprobs), mesh)

    return _over_rows(local, config, mesh, 1)(policy, rows)


def _in_bins(
    program: Callable[[Any, Transformer[Array], Batch[Array]], tuple[Array, ...]],
    objective: CriticObjective | PolicyObjective,
    weights: Transformer[Array],
    batch: Batch[Array],
) -> list[Array]:
    """What `program` says of rows dealt out to bins, in the order of the batch."""
    mesh = objective.mesh
    batch = Batch(batch.tokens, batch.valid, batch.mask)
    tokens, counted = counts_of(batch).of("actor", np.arange(batch.tokens.shape[0]), idle=False)
    laid = plan(tokens, counted, batch.tokens.shape[1], mesh.size(mesh.dp), mesh)
    rows = place_rows(take_rows([batch], laid.order, mesh), laid.starts, mesh)
    found = program(replace(objective, packed=laid.sizes), weights, rows)
    # Any column carries them back.
    back = np.argsort(laid.order)
    columns = [take_rows([replace(rows, old_values=x)], back, mesh).old_values for x in found]
    return [given(column) for column in columns]


def _over_rows(local: Any, config: ModelConfig, mesh: FoldedMesh, arguments: int = 2) -> Any:
    """Over the rows of as many arguments after the weights."""
    rows = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), *[rows] * arguments),
        out_specs=rows,
    )
