"""The gated delta rule: a recurrent state per head that decays and that each token corrects.

With query q, key k and value v of a token, decay ``0 < a <= 1`` and strength ``0 <= b <= 1`` (alpha
and beta in the papers), the state S (keys times values) and the output o of the token are

    S <- a S;  S <- S + b k (v - S^T k)^T;  o = S^T q

That is a product over a sequence of matrices ``a (1 - b k k^T)``. `recurrent`, the reference
implementation, computes it token by token. `chunked` writes the sum that a chunk of tokens adds as
``sum_i k_i u_i^T`` (the WY representation): the u solve a triangular system, ``(1 + L) u = b v -
...`` with ``L_ij = b_i (k_i k_j) a_{j+1} ... a_i``, so that all but one step per chunk are matrix
products.

Everything is float32, in products of highest precision on every device: an error in a state
persists.

References:
  Yang et al., "Gated Delta Networks", 2024, sections 3.1 to 3.3. https://arxiv.org/abs/2412.06464
  Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024.
  https://arxiv.org/abs/2406.06484
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.collectives import match_varying

IMPLEMENTATIONS = ("chunked", "recurrent")
MAX_CHUNK_TOKENS = 64
"""Tokens of a chunk, at most: the width of a tile of the products."""

State = Float[Array, "row value_heads key_dim value_dim"]

_product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """Inputs of the rule per token, ``[row, time, ...]``, float32.

    Attributes:
      query, key: ``[..., key_heads, key_dim]``.
      value: ``[..., key_heads, group, value_dim]``: value heads, grouped by key head.
      log_decay: ``[..., key_heads, group]`` the logarithm of a, at most 0.
      strength: ``[..., key_heads, group]`` b; a token whose `strength` and `log_decay` are 0 leaves
        the state unchanged.
      starts: ``[...]`` true for the first token of a sequence, before which the state is 0. The
        first token of a row need not be one: it may continue from an initial state.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array
    strength: Array
    starts: Array


def gated_delta_rule(
    tokens: Tokens, initial: State, implementation: str | None = None
) -> tuple[Float[Array, "row time value_heads value_dim"], State]:
    """Gated delta rule over rows: the output of each token, and the state after the last.

    Args:
      initial: the state before the first token of each row.
      implementation: "chunked" or the reference implementation "recurrent"; None is "chunked".

    Raises:
      ValueError: on an unknown name.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation={implementation!r} is not known: choose among "
            f"{', '.join(IMPLEMENTATIONS)}, or None for the best that applies."
        )
    rule = recurrent if implementation == "recurrent" else chunked
    heads = tokens.value.shape[2:4]
    state = initial.reshape(initial.shape[0], *heads, *initial.shape[2:])
    read, state = rule(*match_varying((tokens, state)))
    return read.reshape(*read.shape[:2], -1, read.shape[-1]), state.reshape(initial.shape)


def step_token(state: Array, token: Tokens) -> tuple[Array, Array]:
    """Step of the recurrence: the state after a token of each row, and the token's output.

    Args:
      state: ``[row, key_heads, group, key_dim, value_dim]``.
      token: without the dimension of time.
    """
    decay = jnp.where(token.starts[:, None, None], 0.0, jnp.exp(token.log_decay))
    state = state * decay[..., None, None]
    predicted = _product("rhgkv,rhk->rhgv", state, token.key)
    new = (token.value - predicted) * token.strength[..., None]
    state = state + _product("rhk,rhgv->rhgkv", token.key, new)
    return state, _product("rhgkv,rhk->rhgv", state, token.query)


def recurrent(tokens: Tokens, state: Array) -> tuple[Array, Array]:
    """Reference implementation: the recurrence token by token."""
    by_token = Tokens(*(jnp.moveaxis(x, 1, 0) for x in tokens))
    state, read = lax.scan(step_token, state, by_token)
    return jnp.moveaxis(read, 0, 1), state


def chunked(tokens: Tokens, state: Array) -> tuple[Array, Array]:
    """Chunked algorithm: a loop over chunks of tokens.

    It takes at most ``C (5 key_dim + 3 value_dim) / 2 + 3 key_dim value_dim`` multiplications per
    token and value head, C being `MAX_CHUNK_TOKENS`; `recurrent` takes the last term alone.
    """
    time = tokens.key.shape[1]
    if time == 0:
        return tokens.value, state
    size = min(MAX_CHUNK_TOKENS, time)
    chunks = Tokens(*(_split_chunks(x, size) for x in tokens))
    # Log-decay from the start of the chunk, and the number of sequences that started since.
    log_decays = jnp.cumsum(jnp.moveaxis(chunks.log_decay, 2, -1), axis=-1)
    num_starts = jnp.cumsum(chunks.starts.astype(jnp.int32), axis=-1)[:, :, None, None]
    decay = _pairwise_decay(log_decays, num_starts)
    same_keys = _product("nrihk,nrjhk->nrhij", chunks.key, chunks.key)[:, :, :, None]
    strength = jnp.moveaxis(chunks.strength, 2, -1)
    system = strength[..., None] * same_keys * decay
    start_decay = jnp.where(num_starts == 0, jnp.exp(log_decays), 0.0)
    keys = jnp.moveaxis(chunks.key, 2, 3)[:, :, :, None]
    values = jnp.moveaxis(chunks.value, 2, 4)
    # `triangular_solve` reads neither the upper triangle nor the diagonal, which counts as ones.
    rhs = jnp.concatenate(
        [strength[..., None] * values, (strength * start_decay)[..., None] * keys], axis=-1
    )
    solved = lax.linalg.triangular_solve(
        system, rhs, left_side=True, lower=True, unit_diagonal=True
    )
    new, seen = jnp.split(solved, [values.shape[-1]], axis=-1)
    queries = jnp.moveaxis(chunks.query, 2, 3)
    scores = _product("nrhik,nrhjk->nrhij", queries, keys[:, :, :, 0])[:, :, :, None] * decay

    def chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        new, seen, queries, scores, keys, start_decay, to_end = inputs
        new = new - _product("rhgik,rhgkv->rhgiv", seen, state)
        read = start_decay[..., None] * _product("rhik,rhgkv->rhgiv", queries, state)
        read = read + _product("rhgij,rhgjv->rhgiv", scores, new)
        added = _product("rhik,rhgi,rhgiv->rhgkv", keys, to_end, new)
        return state * start_decay[..., -1, None, None] + added, read

    inputs = new, seen, queries, scores, keys[:, :, :, 0], start_decay, decay[..., -1, :]
    state, read = lax.scan(chunk, state, inputs)
    # [chunk, row, head, group, token, value_dim]
    read = jnp.moveaxis(read, (0, 4), (1, 2))
    return read.reshape(read.shape[0], -1, *read.shape[3:])[:, :time], state


def _split_chunks(x: Array, size: int) -> Array:
    """Reshapes ``[row, time, ...]`` to ``[chunk, row, size, ...]``, padded with zeros."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:])))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _pairwise_decay(
    log_decays: Float[Array, "*batch token"], num_starts: Int[Array, "*_batch token"]
) -> Float[Array, "*batch token token"]:
    """Decay from each earlier token j of a chunk to each token i, ``a_{j+1} ... a_i``; 0 where they
    belong to different sequences, and above the diagonal."""
    same_sequence = jnp.tril(num_starts[..., :, None] == num_starts[..., None, :])
    between = log_decays[..., :, None] - log_decays[..., None, :]
    # Above the diagonal the difference is positive and could overflow, in the gradient too.
    return jnp.where(same_sequence, jnp.exp(jnp.where(same_sequence, between, 0.0)), 0.0)
