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


class Scores(NamedTuple):
    """What the policy says about given tokens, aligned to them; 0 at the first token.

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
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> Scores:
    """One forward pass over whole sequences, inside the `jax.shard_map`."""
    logits, router = model.next_token_logits(weights, tokens, valid, config, mesh)
    following = vary(model.next_tokens(tokens, mesh), mesh.axes)
    scaled = policy_logits(logits, sampling)
    logprobs = logprobs_of(scaled, following)
    probabilities = jax.nn.softmax(scaled, axis=-1)
    entropy = jax.nn.logsumexp(scaled, axis=-1) - jnp.sum(probabilities * scaled, axis=-1)
    if sampling.truncates:
        narrowed = sampler_logits(jax.lax.stop_gradient(logits), sampling)
        sampled = logprobs_of(narrowed, following)
    else:
        sampled = jax.lax.stop_gradient(logprobs)

    def aligned(after: Float[Array, "local"]) -> Float[Array, "batch time"]:
        return model.align_to_tokens(after, tokens.shape, mesh)

    return Scores(aligned(logprobs), aligned(sampled), aligned(entropy), router)
