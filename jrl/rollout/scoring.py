"""Scoring of given tokens in one forward pass: log-probabilities, entropies and values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jrl.rollout.sampling import Sampling, logprobs_of, sampler_logits
from moe import model, stages
from moe.config import ModelConfig
from moe.head import is_argmax, logits_of, logprobs_and_entropy, value_of
from moe.ops.zigzag import ZigzagLayout
from moe.router.routing import choices_dtype
from moe.router.statistics import RouterStatistics
from moe.tokens import alignment
from moe.tokens.packing import PackedBatch, pack_shared_prompts
from moe.weights import Transformer
from sharding.collectives import join_shards, vary
from sharding.folding import FoldedMesh

Choices = Integer[Array, "batch time layer k"]


class PromptLayout(NamedTuple):
    """Layout of prompts and responses in rows of tokens.

    Attributes:
      prompt_length: positions of the padded prompt.
      group_size: number of consecutive rows that share a prompt.
    """

    prompt_length: int
    group_size: int


class Scores(NamedTuple):
    """Log-probabilities and entropies of given response tokens, aligned to them; prompts get 0.

    Attributes:
      logprobs: ``[batch, time]`` in the full policy at the sampling temperature, nats.
      behaviour_logprobs: ``[batch, time]`` in the distribution that is sampled from at the base
        temperature (top-k and top-p applied), nats, without gradient: not that of an adaptive
        temperature.
      entropy: ``[batch, time]`` of the policy's distribution over the token, nats.
      router: this device's router sums, None without experts.
      choices: ``[batch, time, layer, k]`` expert ids of each token, prompts too, as in
        `jrl.recipes.base.batch.Batch`; None where they were not requested.
    """

    logprobs: Array
    behaviour_logprobs: Array
    entropy: Array
    router: RouterStatistics[Array] | None
    choices: Array | None = None


def score(
    weights: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
    choices: Choices | None = None,
    *,
    record_choices: bool = False,
) -> Scores:
    """Scores whole sequences by one forward pass, inside the `jax.shard_map`.

    On a pipeline it runs `num_micro_batches` micro-batches.

    Args:
      choices: expert ids to replay, see `pack`.
      record_choices: true to return the expert ids of this pass.
    """

    def read(weights, x, tokens):
        return scores_of(weights, x, tokens, layout, config, sampling, mesh)

    # One tuple: a pipeline splits all three into micro-batches in the same way.
    inputs = tokens, valid, choices
    scores, router = _read_states(weights, inputs, layout, read, config, mesh, record_choices)
    # None without experts, and where not requested: it is the largest array of all.
    if router is None or router.choices is None:
        return scores._replace(router=router)
    recorded = _gather_choices(router.choices, tokens.shape, layout, config, mesh)
    # Removed from the sums: those are summed over ranks, expert ids must not be.
    return scores._replace(router=replace(router, choices=None), choices=recorded)


def score_with_argmax(
    weights: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """Log-probabilities of given response tokens, nats, and 1 for each that is the argmax of its
    distribution, 0 for the others, by one forward pass as in `score`."""

    def read(weights, x, tokens):
        x = alignment.response_states(
            x, tokens.shape, layout.prompt_length, layout.group_size, mesh, config
        )
        response_tokens = vary(
            alignment.response_tokens(tokens, layout.prompt_length, mesh, config), mesh.axes
        )
        # At temperature 1: the argmax is that of the policy, whatever the sampling parameters.
        logprobs, _ = logprobs_and_entropy(weights, x, response_tokens, config, mesh)
        matches_argmax = is_argmax(weights, x, response_tokens, config, mesh).astype(jnp.float32)
        return tuple(
            alignment.expand_responses(values, tokens.shape, layout.prompt_length, mesh, config)
            for values in (logprobs, matches_argmax)
        )

    (logprobs, matches_argmax), router = _read_states(
        weights, (tokens, valid, None), layout, read, config, mesh
    )
    return logprobs, matches_argmax, router


def mark_replicated(tree, mesh: FoldedMesh):
    """Types `tree` as varying over ``dp`` only, by a maximum over the other axes, whose ranks have
    equal values."""
    others = tuple(axis for axis in mesh.except_sequence if axis not in mesh.dp)
    # The maximum of equal values is exact, where a mean would round.
    return jax.tree.map(
        lambda x: (
            jax.lax.pmax(x.astype(jnp.int8), others).astype(bool)
            if x.dtype == bool
            else jax.lax.pmax(x, others)
        ),
        tree,
    )


def pack(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
    choices: Choices | None = None,
) -> PackedBatch:
    """Packs the tokens with shared prompts, the input of the network.

    Args:
      choices: expert ids to replay; those of a prompt are taken from the first of the rows that
        share it, and tokens without a record are routed normally.
    """
    # Layer axis first, for the scan over layers.
    replay = None if choices is None else jnp.moveaxis(choices, 2, 0)
    return pack_shared_prompts(
        tokens, valid, layout.prompt_length, layout.group_size, mesh, config, replay
    )


def scores_of(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> Scores:
    """Scores from the last hidden states `x` of the packed `tokens`, without `router`."""
    x = alignment.response_states(
        x, tokens.shape, layout.prompt_length, layout.group_size, mesh, config
    )
    # State t - 1 predicts token t: both in the order of responses, one shard each.
    responses = vary(
        alignment.response_tokens(tokens, layout.prompt_length, mesh, config), mesh.axes
    )
    logprobs, sampled, entropy = token_scores(weights, x, responses, config, sampling, mesh)

    def aligned(before: Float[Array, "local"]) -> Float[Array, "batch time"]:
        return alignment.expand_responses(before, tokens.shape, layout.prompt_length, mesh, config)

    return Scores(aligned(logprobs), aligned(sampled), aligned(entropy), None)


def token_scores(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local"], Float[Array, "local"], Float[Array, "local"]]:
    """Computes `Scores.logprobs`, `Scores.behaviour_logprobs` and `Scores.entropy` of tokens.

    Args:
      x: the last hidden state that predicts each of them, this rank's shard.
    """
    # At the base temperature, even where each token has its own: sampler and trainer must agree on
    # the policy, not on the distribution that a token was sampled from.
    logprobs, entropy = logprobs_and_entropy(
        weights, x, tokens, config, mesh, sampling.policy_temperature
    )
    # Without top-k, top-p and greedy the two distributions are equal: no second pass over the head.
    if not sampling.truncates:
        return logprobs, jax.lax.stop_gradient(logprobs), entropy
    # Top-k and top-p need all logits; without a gradient none of them is kept in memory.
    logits = logits_of(*jax.lax.stop_gradient((weights, x)), config, mesh)
    return logprobs, logprobs_of(sampler_logits(logits, sampling), tokens), entropy


def score_values(
    critic: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """Critic values of the state before each response token, and router sums; prompts get 0."""

    def read(critic, x, tokens):
        return values_of(critic, x, tokens, layout, config, mesh)

    return _read_states(critic, (tokens, valid, None), layout, read, config, mesh)


def values_of(
    critic: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Float[Array, "batch time"]:
    """Critic values from the last hidden states `x` of the packed `tokens`."""
    x = alignment.response_states(
        x, tokens.shape, layout.prompt_length, layout.group_size, mesh, config
    )
    # Of the state before the token, so that V does not depend on the action of its advantage.
    before = value_of(critic, x, config)
    return alignment.expand_responses(before, tokens.shape, layout.prompt_length, mesh, config)


def num_micro_batches(num_rows: int, time: int, layout: PromptLayout, mesh: FoldedMesh) -> int:
    """Number of micro-batches that scoring splits its rows into on a pipeline: at most four per
    stage, with a bubble of a fifth of the time, if groups of `PromptLayout.group_size` and tokens
    divide.

    Args:
      num_rows: on this device.
      time: prompt and response, in tokens.
    """
    cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)

    def fits(count: int) -> bool:
        # Whole groups: a split group would run its prompt in each micro-batch.
        rows_per_batch = num_rows // count
        sections = (
            (rows_per_batch // layout.group_size, layout.prompt_length),
            (rows_per_batch, time - layout.prompt_length),
        )
        # Equal shards of either section on every rank: one compiled function runs on all.
        divides = (ZigzagLayout((section,), cp).num_tokens % ranks == 0 for section in sections)
        return num_rows % (count * layout.group_size) == 0 and all(divides)

    # The largest valid number: more micro-batches mean a smaller pipeline bubble.
    return max((n for n in range(1, 4 * mesh.layout.pp + 1) if fits(n)), default=1)


def _read_states(
    weights: Transformer[Array],
    inputs: tuple[Array, Array, Array | None],
    layout: PromptLayout,
    read: Callable[[Transformer[Array], Array, Array], Any],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool = False,
) -> tuple[Any, RouterStatistics[Array] | None]:
    """Runs the network, and applies `read` to the last hidden states. Returns its result, rows in
    the order given, and the router's sums.

    Args:
      inputs: tokens, their valid mask, and expert ids to replay.
      record_choices: true to add `choices` to the sums, ``[layer, token, k]`` or, of a pipeline's
        micro-batches, ``[layer, micro_batch, token, k]``.
    """

    def pack_rows(tokens, valid, choices):
        batch = pack(tokens, valid, layout, config, mesh, choices)
        return batch._replace(record_choices=record_choices)

    # Without pipeline stages all rows run in one batch, for the largest GEMMs.
    if mesh.layout.pp == 1:
        x, router = model.run(weights, pack_rows(*inputs), config, mesh)
        return read(weights, x, inputs[0]), router
    rows, time = inputs[0].shape
    num_batches = num_micro_batches(rows, time, layout, mesh)
    # Consecutive rows: a group that shares its prompt stays in one micro-batch.
    micro_batches = jax.tree.map(lambda x: x.reshape(num_batches, -1, *x.shape[1:]), inputs)
    outs, router = stages.scan_micro_batches(
        weights,
        micro_batches,
        lambda micro_batch: pack_rows(*micro_batch),
        lambda weights, x, micro_batch: read(weights, x, micro_batch[0]),
        config,
        mesh,
    )
    # The stages agree; without a pipeline a size-1 axis would still mark the result as varying.
    outs = vary(outs, mesh.pp)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), router


def _gather_choices(
    choices: Int[Array, "layer *micro_batch token k"],
    shape: tuple[int, ...],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Choices:
    """Gathers the expert ids of this device's tokens, as `_read_states` returns them, into the
    rows of all tokens."""
    # [token, micro_batch, layer, k]: shards of tokens are concatenated on the first axis.
    by_token = choices.reshape(choices.shape[0], -1, *choices.shape[-2:]).transpose(2, 1, 0, 3)
    # Gathered on every rank: a row has tokens of all shards.
    by_token = join_shards(by_token, mesh.sequence)
    num_batches = by_token.shape[1]
    batch_shape = shape[0] // num_batches, shape[1]
    rows = [
        alignment.unpack_shared_prompts(
            by_token[:, n], batch_shape, layout.prompt_length, layout.group_size, mesh, config
        )
        for n in range(num_batches)
    ]
    # Typed as varying over `pp`, as the other results of a pipeline.
    return vary(jnp.concatenate(rows).astype(choices_dtype(config.num_experts)), mesh.pp)
