"""The training side of a rollout: the log-probabilities of tokens that are already there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from jrl.rollout.sampling import Sampling, logprobs_of, sampler_logits
from moe import model, stages
from moe.config import ModelConfig
from moe.head import logits_of, logprobs_and_entropy, value_of
from moe.router.statistics import RouterStatistics
from moe.tokens import alignment
from moe.tokens.packing import PackedBatch, pack_shared_prompts
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Transformer
from sharding.collectives import vary
from sharding.folding import FoldedMesh


class PromptLayout(NamedTuple):
    """How prompts and responses lie in rows of tokens.

    Attributes:
      prompt_length: columns of the padded prompt.
      group_size: rows that share their prompt stand together in runs of this many.
    """

    prompt_length: int
    group_size: int


class Scores(NamedTuple):
    """What the policy says about given response tokens, aligned to them; prompts get 0.

    Attributes:
      logprobs: ``[batch, time]`` in the whole policy at the sampling temperature, nats.
      behaviour_logprobs: ``[batch, time]`` in the distribution tokens are drawn from (top-k and
        top-p applied), nats, without gradient.
      entropy: ``[batch, time]`` of the policy's distribution over the token, nats.
      router: this device's router sums, None without experts.
    """

    logprobs: Array
    behaviour_logprobs: Array
    entropy: Array
    router: RouterStatistics[Array] | None


def score(
    weights: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> Scores:
    """One forward pass over whole sequences, inside the `jax.shard_map`.

    On a pipeline, as many micro-batches as `num_micro_batches` says.
    """

    def read(weights, x, tokens):
        return scores_of(weights, x, tokens, layout, config, sampling, mesh)

    scores, router = _read_states(weights, tokens, valid, layout, read, config, mesh)
    return scores._replace(router=router)


def pack(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> PackedBatch:
    """The tokens as the network runs them."""
    model.check_window(tokens.shape[1], config)
    return pack_shared_prompts(
        tokens, valid, layout.prompt_length, layout.group_size, mesh, config.execution
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
    """The scores read off the last hidden states `x` of the packed `tokens`, `router` left
    out."""
    x = alignment.responses_of(x, tokens.shape, layout.prompt_length, layout.group_size, mesh)
    responses = vary(alignment.response_tokens(tokens, layout.prompt_length, mesh), mesh.axes)
    logprobs, sampled, entropy = token_scores(weights, x, responses, config, sampling, mesh)

    def aligned(before: Float[Array, "local"]) -> Float[Array, "batch time"]:
        return alignment.on_responses(before, tokens.shape, layout.prompt_length, mesh)

    return Scores(aligned(logprobs), aligned(sampled), aligned(entropy), None)


def token_scores(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local"], Float[Array, "local"], Float[Array, "local"]]:
    """`Scores.logprobs`, `Scores.behaviour_logprobs` and `Scores.entropy` of tokens.

    Args:
      x: the last hidden state that each of them was predicted from, this rank's shard.
    """
    logprobs, entropy = logprobs_and_entropy(
        weights, x, tokens, config, mesh, sampling.policy_temperature
    )
    if not sampling.truncates:
        return logprobs, jax.lax.stop_gradient(logprobs), entropy
    # What is cut away is known from all logits; without a gradient none of them is kept.
    logits = logits_of(*jax.lax.stop_gradient((weights, x)), config, mesh)
    return logprobs, logprobs_of(sampler_logits(logits, sampling), tokens), entropy


def value(
    critic: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """The critic's estimate of the state before each response token; prompts get 0."""

    def read(critic, x, tokens):
        return values_of(critic, x, tokens, layout, config, mesh)

    return _read_states(critic, tokens, valid, layout, read, config, mesh)


def values_of(
    critic: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "batch time"],
    layout: PromptLayout,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Float[Array, "batch time"]:
    """The values read off the last hidden states `x` of the packed `tokens`."""
    x = alignment.responses_of(x, tokens.shape, layout.prompt_length, layout.group_size, mesh)
    before = value_of(critic, x, config)
    return alignment.on_responses(before, tokens.shape, layout.prompt_length, mesh)


def num_micro_batches(num_rows: int, time: int, layout: PromptLayout, mesh: FoldedMesh) -> int:
    """Micro-batches that scoring cuts its rows into on a pipeline: at most four per stage, which
    leaves it idle a fifth of the time, if groups of `PromptLayout.group_size` and tokens divide.

    Args:
      num_rows: on this device.
      time: prompt and response, in tokens.
    """
    cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)

    def fits(number: int) -> bool:
        own = num_rows // number
        sections = (
            (own // layout.group_size, layout.prompt_length),
            (own, time - layout.prompt_length),
        )
        divides = (ZigzagLayout((section,), cp).num_tokens % ranks == 0 for section in sections)
        return num_rows % (number * layout.group_size) == 0 and all(divides)

    return max((n for n in range(1, 4 * mesh.layout.pp + 1) if fits(n)), default=1)


def _read_states(
    weights: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    layout: PromptLayout,
    read: Callable[[Transformer[Array], Array, Array], Any],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Any, RouterStatistics[Array] | None]:
    """What `read` makes of the last hidden states, rows in the order given, and the router's
    sums."""
    if mesh.layout.pp == 1:
        x, router = model.run(weights, pack(tokens, valid, layout, config, mesh), config, mesh)
        return read(weights, x, tokens), router
    number = num_micro_batches(tokens.shape[0], tokens.shape[1], layout, mesh)
    micro_batches = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), (tokens, valid))
    outs, router = stages.scan_micro_batches(
        weights,
        micro_batches,
        lambda micro_batch: pack(micro_batch[0], micro_batch[1], layout, config, mesh),
        lambda weights, x, micro_batch: read(weights, x, micro_batch[0]),
        config,
        mesh,
    )
    # The stages agree; without a pipeline a size-1 axis would still mark the result as varying.
    outs = vary(outs, mesh.pp)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), router
