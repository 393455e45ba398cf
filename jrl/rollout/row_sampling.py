"""Sampling with per-request parameters: temperature, top-p and seed of each row.

`jrl.rollout.sampling` samples all rows with one static configuration; here temperature, top-p and
seed are arrays, so that requests of any kind share one compiled function. The policy of every row
is the softmax of its logits at temperature 1.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from jrl.rollout.decoding.programs.slots import TopTokens
from jrl.rollout.sampling import argmax_token, logprobs_of

Leaf = TypeVar("Leaf")


@struct.dataclass
class RowSampling(Generic[Leaf]):
    """Sampling parameters of each row.

    Attributes:
      temperatures: ``[row]`` that divide the logits; 0 is greedy.
      top_ps: ``[row]`` in (0, 1]: the smallest set of most probable tokens with this total
        probability is kept, and ties with the last of them.
      seeds: ``[row, 2]`` words, the low one first.
      needs_top_tokens: ``[row]`` true if the top-k tokens of each position are recorded.
    """

    temperatures: Leaf
    top_ps: Leaf
    seeds: Leaf
    needs_top_tokens: Leaf


class RequestSampling(NamedTuple):
    """Sampling parameters of one request.

    Attributes:
      temperature, top_p: as in `RowSampling`.
      seed: in 0..2**64 - 1.
      needs_top_tokens: as in `RowSampling`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    needs_top_tokens: bool = False


def row_keys(
    key: Array,
    seeds: UInt32[Array, "row 2"],
    samples: Int[Array, "row"],
    positions: Int[Array, "row"],
) -> Array:
    """RNG key of each row's next token, from its seed, the sample id and its position in the
    response."""

    def row_key(seed: Array, sample: Array, position: Array) -> Array:
        seed_key = jax.random.fold_in(jax.random.fold_in(key, seed[0]), seed[1])
        return jax.random.fold_in(jax.random.fold_in(seed_key, sample), position)

    return jax.vmap(row_key)(seeds, samples, positions)


def sample_rows(
    logits: Float[Array, "row vocab"], rows: RowSampling[Array], keys: Array
) -> tuple[Int[Array, "row"], Float[Array, "row"], Float[Array, "row"]]:
    """Samples one token per row; `jrl.rollout.sampling.sample_tokens` does it with parameters
    that all rows share.

    Returns:
      The tokens, their log-probabilities in the distribution sampled from (0 where it is greedy),
      and in the policy at temperature 1.
    """
    greedy = rows.temperatures == 0

    def sample() -> tuple[Array, Array]:
        scaled = logits / jnp.where(greedy, 1.0, rows.temperatures)[:, None]
        any_top_p = jnp.any((rows.top_ps < 1) & ~greedy)
        narrowed = jax.lax.cond(
            any_top_p, lambda: _apply_top_p(scaled, rows.top_ps), lambda: scaled
        )
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))(keys)
        tokens = argmax_token(narrowed + noise)
        return tokens, logprobs_of(narrowed, tokens)

    best = argmax_token(logits)
    # If every row is greedy, no noise is generated.
    tokens, behaviour = jax.lax.cond(
        jnp.all(greedy), lambda: (best, jnp.zeros_like(logits[:, 0])), sample
    )
    tokens = jnp.where(greedy, best, tokens)
    return tokens, jnp.where(greedy, 0.0, behaviour), logprobs_of(logits, tokens)


def top_k_tokens(
    logits: Float[Array, "row vocab"], wanted: Bool[Array, "row"], k: int
) -> TopTokens[Array]:
    """Top-k tokens of each row and their log-probabilities at temperature 1; zeros if no row
    requests them."""

    def compute() -> tuple[Array, Array]:
        best, tokens = jax.lax.top_k(logits, k)
        return tokens.astype(jnp.int32), best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    like = logits[:, :k]
    zeros = jnp.zeros_like(like, jnp.int32), jnp.zeros_like(like)
    return TopTokens(*jax.lax.cond(jnp.any(wanted), compute, lambda: zeros))


def _apply_top_p(
    logits: Float[Array, "row vocab"], top_ps: Float[Array, "row"]
) -> Float[Array, "row vocab"]:
    """Sets the logits of tokens outside of each row's top-p to -inf."""
    ordered = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = top_ps[:, None]
    # The token that reaches top_p stays, so the most probable one always does; top_p = 1 keeps all,
    # even if rounding leaves the sum below 1.
    within = (before < top_p) | (top_p >= 1)
    lowest = jnp.min(jnp.where(within, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)
