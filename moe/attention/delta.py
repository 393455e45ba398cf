"""Gated DeltaNet: linear attention whose state has a fixed size, instead of a KV cache.

Between the projections of the layer are a short causal convolution and the gated delta rule, for
whole sequences or for one token; the output of each value head is normalised and multiplied by a
gate of its own. Padding and other sequences of a row do not affect a
sequence, wherever they are: the tokens of a row are sorted by sequence first, and moved back
afterwards.

With query q, key k and value v of a token, decay ``0 < a <= 1`` and strength ``0 <= b <= 1`` (alpha
and beta in the papers), the state S (keys times values) and the output o of the token are

    S <- a S;  S <- S + b k (v - S^T k)^T;  o = S^T q

That is a product over a sequence of matrices ``a (1 - b k k^T)``. `recurrent`, the reference
implementation, computes it token by token. `chunked` writes the sum that a chunk of tokens adds as
``sum_i k_i u_i^T`` (the WY representation): the u solve a triangular system, ``(1 + L) u = b v -
...`` with ``L_ij = b_i (k_i k_j) a_{j+1} ... a_i``, so that all but one step per chunk are matrix
products. States are float32, in products of highest precision on every device: an error in a state
persists.

References:
  Yang et al., "Gated Delta Networks", 2024, section 3. https://arxiv.org/abs/2412.06464
  Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024.
  https://arxiv.org/abs/2406.06484
  The order of the weights and the normalisation follow Qwen3-Next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from moe.architecture.attention import GatedDeltaNet
from moe.attention.projections import heads
from moe.config import Model, ModelConfig
from moe.ops.mask import MAX_INDEX, SegmentMask
from moe.ops.precision import rms_norm
from moe.remat import PROJECTED
from moe.weights import DeltaNet
from sharding.collectives import local_shard, match_varying, vary, varying
from sharding.folding import FoldedMesh

IMPLEMENTATIONS = ("chunked", "recurrent")
MAX_CHUNK_TOKENS = 64
"""Tokens of a chunk, at most: the width of a tile of the products."""

State = Float[Array, "row value_heads key_dim value_dim"]

_product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)

NORM_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""
Outputs = Float[Array, "token value_heads value_dim"]

Channels = Float[Array, "row time key_heads channel"]
Tail = Float[Array, "row key_heads channel before"]
Filters = Float[Array, "key_heads channel width"]


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
    """Decay from each earlier token j of a chunk to each token i, ``a_{j+1} ... a_i``; 0 if they
    belong to different sequences, and above the diagonal."""
    same_sequence = jnp.tril(num_starts[..., :, None] == num_starts[..., None, :])
    between = log_decays[..., :, None] - log_decays[..., None, :]
    # Above the diagonal the difference is positive and could overflow, in the gradient too.
    return jnp.where(same_sequence, jnp.exp(jnp.where(same_sequence, between, 0.0)), 0.0)


def short_convolution(
    x: Channels, filters: Filters, tail: Tail, reach: Int[Array, "row time"]
) -> Channels:
    """Causal convolution ``silu(sum_i w_{width - 1 - i} x_{t - i})`` over time, float32.

    Args:
      tail: the ``width - 1`` inputs before the first token, in order.
      reach: number of earlier tokens that a token may read, `tail` included: the tokens of its own
        sequence. Others count as 0.
    """
    time, width = x.shape[1], filters.shape[-1]
    extended = prepend_tail(x, tail)
    terms = []
    for back in range(width):
        first = width - 1 - back
        earlier = extended[:, first : first + time]
        reached = (back <= reach)[:, :, None, None]
        terms.append(jnp.where(reached, earlier, 0.0) * filters[None, None, :, :, first])
    return jax.nn.silu(sum(terms[1:], terms[0]))


def tail_after(x: Channels, tail: Tail, lengths: Int[Array, "row"]) -> Tail:
    """Convolution state (the last ``width - 1`` inputs) after `lengths` tokens of each row."""
    indices = lengths[:, None] + jnp.arange(tail.shape[-1])[None]
    last = jax.vmap(lambda row, index: row[index])(prepend_tail(x, tail), indices)
    return jnp.moveaxis(last, 1, -1)


def prepend_tail(x: Channels, tail: Tail) -> Float[Array, "row extended key_heads channel"]:
    """Concatenates the tail and the tokens along time."""
    return jnp.concatenate([jnp.moveaxis(tail, -1, 1), x], axis=1)


class Mixed(NamedTuple):
    """Projections of tokens, for the heads of a ``tp`` rank.

    Attributes:
      content: ``[token, key_heads, channel]`` query, key and values of each key head, before the
        convolution.
      log_decay, strength: ``[token, key_heads, group]`` of each value head, float32; see
        `moe.attention.delta.Tokens`.
    """

    content: Array
    log_decay: Array
    strength: Array


class DeltaState(NamedTuple):
    """Recurrent state from which a row is continued.

    Attributes:
      state: ``[row, value_heads, key_dim, value_dim]`` state of the rule, float32.
      tail: ``[row, key_heads, channel, width - 1]`` last inputs of the convolution, in the dtype of
        `content`.
    """

    state: Array
    tail: Array


@dataclass(frozen=True)
class DeltaCore:
    """Core of Gated DeltaNet, between its projections.

    Args:
      run: (projections of the tokens, ``[key_heads, channel, width]`` filters) -> output of each
        token, float32, and the state of its row after it.
    """

    run: Callable[[Mixed, Array], tuple[Outputs, DeltaState]]

    def record_states(self, record: Callable[[DeltaState], None]) -> "DeltaCore":
        """The same core, which calls `record` with the state of the rows after the tokens."""

        def run(mixed: Mixed, filters: Array) -> tuple[Outputs, DeltaState]:
            read, after = self.run(mixed, filters)
            record(after)
            return read, after

        return DeltaCore(run)


def delta_core(mask: SegmentMask | None, config: ModelConfig) -> DeltaCore:
    """Core for the sequences of a packed batch."""
    assert mask is not None and config.delta is not None
    return DeltaCore(partial(run_sections, mask, config.delta))


def run_sections(
    mask: SegmentMask, delta: GatedDeltaNet, mixed: Mixed, filters: Array
) -> tuple[Outputs, DeltaState]:
    """Runs the sequences of a packed batch, section after section: rows that follow another
    section's rows (responses after prompts) start from the states that these end with.

    Returns:
      The output of each token, and the states after the rows of the last section: after the last
      sequence of each row.
    """
    assert mask.zigzag.ranks == 1  # `moe.placement.specs` refuses the others
    sections = zip(*map(mask.zigzag.split, mixed), strict=True)
    reads, states = [], list[DeltaState]()
    for fields, indices, sources in zip(sections, mask.full_indices(), mask.sources, strict=True):
        section = Mixed(*fields)
        before = _zero_state(section, filters, delta)
        if len(sources) > 1:
            before = DeltaState(*map(sources[-2].rows, states[sources[-2].section]))
        read, after = _run_rows(section, filters, indices.segment, before, mask.single, delta)
        reads.append(read)
        states.append(after)
    return mask.zigzag.join(*reads), states[-1]


def run_step(
    delta: GatedDeltaNet,
    before: DeltaState,
    live: Bool[Array, "row"],
    mixed: Mixed,
    filters: Array,
) -> tuple[Outputs, DeltaState]:
    """Decode step: one token for each row, the next of its sequence; the state of rows that are not
    live stays unchanged."""
    row = Mixed(*(x[:, None] for x in mixed))
    content = row.content.astype(jnp.float32)
    reach = jnp.full(content.shape[:2], MAX_INDEX)
    tail = before.tail.astype(jnp.float32)
    tokens = _tokens(short_convolution(content, filters, tail, reach), row, reach < 0, delta)
    heads = tokens.value.shape[2:4]
    state = before.state.reshape(-1, *heads, *before.state.shape[2:])
    state, read = step_token(state, Tokens(*(x[:, 0] for x in tokens)))
    tail = jnp.moveaxis(prepend_tail(row.content, before.tail)[:, 1:], 1, -1)
    read = read.reshape(read.shape[0], -1, read.shape[-1])
    after = DeltaState(state.reshape(before.state.shape), tail)
    is_live = live[:, None, None, None]
    pairs = zip(after, before, strict=True)
    return read, DeltaState(*(jnp.where(is_live, *pair) for pair in pairs))


def _run_rows(
    mixed: Mixed,
    filters: Array,
    segments: Int[Array, "row time"],
    before: DeltaState,
    single: bool,
    delta: GatedDeltaNet,
) -> tuple[Float[Array, "row time value_heads value_dim"], DeltaState]:
    """Convolution and rule over rows of equal length.

    `segments` is the sequence of each token within its row, 0 for padding. If rows are `single`,
    their one sequence continues from `before`; otherwise each starts from zeros.
    """
    order = jnp.argsort(jnp.where(segments > 0, segments, MAX_INDEX), axis=1, stable=True)
    segments = _reorder(segments, order)
    valid, lengths = segments > 0, jnp.sum(segments > 0, axis=1, dtype=jnp.int32)
    ordered = Mixed(*(_reorder(x, order) for x in mixed))
    column = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
    starts, reach = jnp.zeros_like(valid), jnp.full_like(column, MAX_INDEX)
    if not single:
        new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        starts = new & valid
        reach = column - lax.cummax(jnp.where(starts, column, 0), axis=1)
    # Padding leaves the state unchanged: no decay, no correction.
    is_token = valid[:, :, None, None]
    ordered = ordered._replace(
        log_decay=jnp.where(is_token, ordered.log_decay, 0.0),
        strength=jnp.where(is_token, ordered.strength, 0.0),
    )
    content, tail = ordered.content.astype(jnp.float32), before.tail.astype(jnp.float32)
    tokens = _tokens(short_convolution(content, filters, tail, reach), ordered, starts, delta)
    read, state = gated_delta_rule(tokens, before.state)
    after = DeltaState(state, tail_after(ordered.content, before.tail, lengths))
    return _reorder(read, jnp.argsort(order, axis=1)), after


def _tokens(
    content: Float[Array, "row time key_heads channel"],
    mixed: Mixed,
    starts: Bool[Array, "row time"],
    delta: GatedDeltaNet,
) -> Tokens:
    """Inputs of the rule from the output of the convolution; queries and keys are normalised."""
    width = delta.key_head_dim
    query, key, value = jnp.split(content, [width, 2 * width], axis=-1)
    value = value.reshape(*value.shape[:-1], delta.values_per_key, delta.value_head_dim)
    query = _l2_normalise(query) * width**-0.5
    return Tokens(query, _l2_normalise(key), value, mixed.log_decay, mixed.strength, starts)


def _l2_normalise(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)


def _reorder(x: Shaped[Array, "row time *rest"], order: Int[Array, "row time"]) -> Array:
    """Gathers the tokens of each row in another order."""
    return jax.vmap(lambda row, index: row.at[index].get(unique_indices=True))(x, order)


def _zero_state(mixed: Mixed, filters: Array, delta: GatedDeltaNet) -> DeltaState:
    """State before the first token of a sequence: zeros."""
    rows, _, keys, channel = mixed.content.shape
    heads = keys * delta.values_per_key
    state = jnp.zeros((rows, heads, delta.key_head_dim, delta.value_head_dim))
    tail = jnp.zeros((rows, keys, channel, filters.shape[-1] - 1), mixed.content.dtype)
    return DeltaState(*vary((state, tail), tuple(sorted(varying(mixed.content)))))


def delta_heads(
    weights: DeltaNet[Array], h: Float[Array, "token d_model"], core: DeltaCore, model: Model
) -> Float[Array, "token value_heads value_dim"]:
    """Outputs of the value heads of this ``tp`` rank, before the output projection.

    Args:
      h: normalised tokens, all of this rank's sequences.
    """
    delta = model.config.delta
    assert delta is not None  # the table gives these weights only with it
    projected = checkpoint_name(heads(h, weights.inward), PROJECTED)
    pair = checkpoint_name(heads(h, weights.strength_and_decay), PROJECTED)
    content, gate = jnp.split(projected, [delta.content_dim], axis=-1)
    strength, rate = jnp.split(pair.astype(jnp.float32), 2, axis=-1)
    bias, log_rate = (
        x.reshape(1, -1, delta.values_per_key) for x in (weights.rate_bias, weights.log_rate)
    )
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(rate + bias)
    mixed = Mixed(content, log_decay, jax.nn.sigmoid(strength))
    read, _ = core.run(mixed, _filters(weights.filters, delta, model.mesh))
    by_head = read.reshape(-1, read.shape[-1])
    normed = rms_norm(by_head, weights.read_norm, model.config.norm_epsilon).reshape(read.shape)
    gate = gate.reshape(read.shape).astype(jnp.float32)
    return (normed * jax.nn.silu(gate)).astype(h.dtype)


def _filters(
    filters: Float[Array, "channel width"], delta: GatedDeltaNet, mesh: FoldedMesh
) -> Float[Array, "key_heads head_channel width"]:
    """Convolution filters of the key heads of this ``tp`` rank, float32. In `filters` all channels
    of queries come first, then all of keys, then all of values."""
    wide = filters.astype(jnp.float32)
    keys = delta.num_key_heads * delta.key_head_dim
    by_head = [
        local_shard(part.reshape(delta.num_key_heads, -1, part.shape[-1]), mesh.tp)
        for part in jnp.split(wide, [keys, 2 * keys], axis=0)
    ]
    return jnp.concatenate(by_head, axis=1)
