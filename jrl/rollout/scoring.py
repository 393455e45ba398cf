"""The training side of a rollout: the log-probabilities of tokens that are already there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.rollout.sampling import Sampling, logprobs_of, policy_logits, sampler_logits
from moe import model
from moe.config import ModelConfig
from moe.routing import RouterStatistics
from moe.weights import Transformer
from sharding.collectives import vary
from sharding.folding import FoldedMesh


class Rows(NamedTuple):
    """How rows of tokens are laid out.

    Attributes:
      prompt_length: columns of the padded prompt.
      copies: rows that share their prompt stand together in runs of this many.
    """

    prompt_length: int
    copies: int


class Scores(NamedTuple):
    """What the policy says about given response tokens, aligned to them; prompts get 0.

    Attributes:
      logprobs: ``[batch, time]`` in the whole policy at the sampling temperature, nats.
      sampler_logprobs: ``[batch, time]`` in the distribution tokens are drawn from (top-k and top-p
        applied), nats, without gradient.
      entropy: ``[batch, time]`` of the policy's distribution over the token, nats.
      router: this device's router sums, None without experts.
    """

    logprobs: Array
    sampler_logprobs: Array
    entropy: Array
    router: RouterStatistics[Array] | None


def score(
    weights: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    rows: Rows,
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> Scores:
    """One forward pass over whole sequences, inside the `jax.shard_map`."""
    x, router = model.before_responses(
        weights, tokens, valid, rows.prompt_length, rows.copies, config, mesh
    )
    logits = model.logits_of(weights, x, config)
    responses = vary(model.response_tokens(tokens, rows.prompt_length, mesh), mesh.axes)
    scaled = policy_logits(logits, sampling)
    logprobs = logprobs_of(scaled, responses)
    probabilities = jax.nn.softmax(scaled, axis=-1)
    entropy = jax.nn.logsumexp(scaled, axis=-1) - jnp.sum(probabilities * scaled, axis=-1)
    if sampling.truncates:
        narrowed = sampler_logits(jax.lax.stop_gradient(logits), sampling)
        sampled = logprobs_of(narrowed, responses)
    else:
        sampled = jax.lax.stop_gradient(logprobs)

    def aligned(before: Float[Array, "local"]) -> Float[Array, "batch time"]:
        return model.on_responses(before, tokens.shape, rows.prompt_length, mesh)

    return Scores(aligned(logprobs), aligned(sampled), aligned(entropy), router)


def value(
    critic: Transformer[Array],
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    rows: Rows,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "batch time"], RouterStatistics[Array] | None]:
    """The critic's estimate of the state before each response token; prompts get 0."""
    x, router = model.before_responses(
        critic, tokens, valid, rows.prompt_length, rows.copies, config, mesh
    )
    before = model.value_of(critic, x, config)
    return model.on_responses(before, tokens.shape, rows.prompt_length, mesh), router
