"""Decoding steps: the next token of each live row is sampled and appended, in a loop."""

from dataclasses import replace
from functools import cache as remembered
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jrl.losses import EntropyStatistics
from jrl.rollout.adjustments import adjust_logits
from jrl.rollout.decoding.slots import (
    Decoder,
    SlotPool,
    TokenRows,
    TopTokens,
    over_slots,
    pool_specs,
)
from jrl.rollout.sampling import RowSampling, Sampling, row_keys, sample_rows, sample_tokens
from jrl.rollout.threefry import keys_of
from moe.attention.rotary import rotary_tables
from moe.cache import ROW, Cache, StepTokens, over_columns
from moe.decoding import decode_step
from moe.layers.depth import map_layer_groups, split_layer_groups
from moe.placement import specs
from moe.weights import Layer, Transformer, without_layers
from sharding.collectives import all_sum, join_shards, local_shard, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit, jit_onto, named_shardings

Leaf = TypeVar("Leaf")


class SamplerState(NamedTuple):
    """Sampler state of the next tokens, on every device.

    Attributes:
      key: data of the RNG key from which the keys of all tokens are derived.
      version: of the weights.
      entropy: statistics of the step before, for an adaptive temperature.
      rows: per-request sampling parameters, sharded over the slots; None where all rows share one
        `Sampling`.
      greedy: ``[]`` true to take the argmax, see `jrl.rollout.sampling.sample_tokens`.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None
    rows: RowSampling[Array] | None = None
    greedy: Array | None = None


class NextTokens(NamedTuple):
    """Next token of each row.

    Attributes:
      tokens: ids.
      behaviour_logprobs, old_logprobs: of them, as in `TokenRows`.
      top_tokens: top-k tokens of the position; None where they are not recorded.
    """

    tokens: Array
    behaviour_logprobs: Array
    old_logprobs: Array
    top_tokens: TopTokens[Array] | None = None


def sampler_state_specs(mesh: FoldedMesh, sampler_state: SamplerState) -> Any:
    """Partition specs of the sampler state."""
    specs = jax.tree.map(lambda _: PartitionSpec(), sampler_state)
    return specs._replace(rows=jax.tree.map(lambda _: over_slots(mesh), sampler_state.rows))


def sample_next_tokens(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    sampler_state: SamplerState,
) -> NextTokens:
    """Samples the next token of each row with its log-probabilities, the same on every rank of
    ``tp``.

    Args:
      logits: of this rank's shard of the rows.
    """
    # Each rank of tp samples for its shard of the rows, of which it has all logits; then tokens are
    # all-gathered.
    key, axes = keys_of(sampler_state.key), decoder.mesh.sequence
    samples = local_shard(pool.samples, axes)
    # Counted from the start of the response, so that a resumed row uses the same RNG keys as an
    # uninterrupted one.
    positions = local_shard(rows.lengths - pool.responses, axes)
    if sampler_state.rows is not None:
        row_sampling = jax.tree.map(lambda x: local_shard(x, axes), sampler_state.rows)
        keys = row_keys(key, *row_sampling.seeds.T, samples, positions)
        adjusted = None
        if row_sampling.adjustments is not None:
            history = rows.tokens, pool.responses, rows.lengths
            history = (local_shard(x, axes) for x in history)
            adjusted = adjust_logits(logits, row_sampling.adjustments, *history)
        sampled = sample_rows(logits, row_sampling, keys, adjusted)
        top_tokens = None
        if decoder.top_logprobs:
            top_tokens = _top_k_tokens(logits, row_sampling.needs_top_tokens, decoder.top_logprobs)
        return jax.tree.map(lambda x: join_shards(x, axes), NextTokens(*sampled, top_tokens))

    keys = row_keys(key, local_shard(pool.prompts, axes), samples, positions)
    entropy, greedy = vary((sampler_state.entropy, sampler_state.greedy), decoder.mesh.axes)
    token, behaviour, old = sample_tokens(logits, sampling, keys, entropy, greedy)
    return NextTokens(
        join_shards(token, axes), join_shards(behaviour, axes), join_shards(old, axes)
    )


def _top_k_tokens(
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


def append_tokens(
    decoder: Decoder,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    grows: Array,
    sampled: NextTokens,
    version: Array,
) -> tuple[TokenRows[Array], Array]:
    """Appends the sampled tokens to the rows in the mask `grows`; returns the rows, and the mask of
    those that continue."""
    token, behaviour, old, top_tokens = sampled
    # Position of the next token; other rows are not written to.
    positions = rows.lengths
    # Per token, not per row: a row in flight may continue with newer weights.
    versions = jnp.broadcast_to(version.astype(jnp.int32), token.shape)
    longer = replace(
        rows,
        lengths=rows.lengths + grows.astype(jnp.int32),
        tokens=write_token(rows.tokens, grows, positions, token),
        behaviour_logprobs=write_token(rows.behaviour_logprobs, grows, positions, behaviour),
        old_logprobs=write_token(rows.old_logprobs, grows, positions, old),
        versions=write_token(rows.versions, grows, positions, versions),
    )
    if top_tokens is not None:
        recorded = jax.tree.map(
            lambda into, new: write_token(into, grows, positions, new), rows.top_tokens, top_tokens
        )
        longer = replace(longer, top_tokens=recorded)
    # The token that ends a response is part of it.
    continues = grows & (longer.lengths < pool.limits)
    for stop in decoder.stop_ids:
        continues = continues & (token != stop)
    return longer, continues


def write_token(into: Array, where: Array, position: Array, new: Array | None) -> Array:
    """Writes `new` at one position per row of `into`, for the rows in the mask `where`."""
    assert new is not None
    # Past the end, where writes are dropped.
    position = jnp.where(where, position, into.shape[1])
    return into.at[jnp.arange(into.shape[0]), position].set(
        new.astype(into.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )


class Advanced(NamedTuple):
    """Counters of `advance` for the host, the same on every device.

    Attributes:
      steps: decoding steps, the tokens of the longest-lived row.
      row_steps: tokens of all rows.
    """

    steps: Array
    row_steps: Array


@struct.dataclass
class StepLimits(Generic[Leaf]):
    """Limits of `advance`.

    Attributes:
      max_steps: maximum tokens per row.
      min_live: it stops when at most this many rows are live.
      slots: the slots to compute, of each ``dp`` rank, counted from its first; must include all
        live ones, none twice. None is all.
    """

    max_steps: Leaf
    min_live: Leaf
    slots: Leaf | None = None


@struct.dataclass
class UnstackedPolicy(Generic[Leaf]):
    """Unstacked weights for decoding: every step reads all of them, so each layer's are contiguous.

    Attributes:
      layers: the groups of `moe.layers.depth.split_layer_groups`: a record per layer, or per stack
        that is scanned.
      rest: everything else, without layers.
    """

    layers: tuple[Layer[Leaf], ...]
    rest: Transformer[Leaf]


def unstack_policy(decoder: Decoder, weights: Transformer[Array]) -> UnstackedPolicy[Array]:
    """Unstacks the weights, once for all steps: no step slices a layer out of its stack.

    Stacks that are scanned and the weights outside layers are those of `weights`, not copies,
    unless they are sharded otherwise than for decoding (`Execution.fsdp`).
    """
    layers = map_layer_groups(weights, decoder.config, lambda leaf, index: _COPY)
    policy = UnstackedPolicy(layers, without_layers(weights))
    leaves, structure = jax.tree.flatten(policy)
    shardings = jax.tree.leaves(named_shardings(_policy_specs(decoder), decoder.mesh))
    is_shared = tuple(map(_has_sharding, leaves, shardings))
    if all(is_shared):
        return policy
    copied = iter(_compiled_unstack(decoder, is_shared)(weights))
    pairs = zip(leaves, is_shared, strict=True)
    return structure.unflatten([leaf if shared else next(copied) for leaf, shared in pairs])


_COPY: Any = object()
"""Leaf of a layer that is sliced out of its stack."""


def _has_sharding(leaf: Any, sharding: NamedSharding) -> bool:
    if leaf is _COPY or isinstance(leaf, Tracer):
        return False
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@remembered
def _compiled_unstack(decoder: Decoder, is_shared: tuple[bool, ...]) -> Any:
    """Compiled function of the weights that returns the leaves which are not shared."""
    config, mesh = decoder.config, decoder.mesh

    def select(tree: Any) -> list[Any]:
        leaves = zip(jax.tree.leaves(tree), is_shared, strict=True)
        return [leaf for leaf, shared in leaves if not shared]

    def unstack(weights: Transformer[Array]) -> list[Array]:
        return select(UnstackedPolicy(split_layer_groups(weights, config), without_layers(weights)))

    return jit_onto(unstack, select(named_shardings(_policy_specs(decoder), mesh)))


def _policy_specs(decoder: Decoder) -> UnstackedPolicy[PartitionSpec]:
    stacked = specs(decoder.config, decoder.mesh)

    # A single layer has no leading layer axis; a stack that is scanned keeps it.
    def layer_spec(spec: PartitionSpec, index: int | slice) -> PartitionSpec:
        return spec if isinstance(index, slice) else PartitionSpec(*spec[1:])

    return UnstackedPolicy(
        map_layer_groups(stacked, decoder.config, layer_spec), without_layers(stacked)
    )


class _Loop(NamedTuple):
    """Carry of the decoding loop; `steps` counts tokens of the longest-lived row."""

    steps: Array
    num_live: Array
    row_steps: Array
    rows: TokenRows[Array]
    live: Array
    cache: Cache[Array]


@partial(MeshJit, overlap=False, static_argnums=(0, 1, 2), donate_argnums=4)
def advance(
    decoder: Decoder,
    sampling: Sampling,
    cache_length: int,
    policy: UnstackedPolicy[Array],
    pool: SlotPool[Array],
    sampler_state: SamplerState,
    limits: StepLimits[Array],
) -> tuple[SlotPool[Array], Advanced]:
    """Samples tokens of all live rows within the limits.

    The RNG key of a token is derived from the key, the prompt and sample ids, and its position in
    the response: neither slot nor mesh nor other rows affect it.

    Args:
      sampling: sampling parameters.
      cache_length: positions of the cache that attention reads; every live row must end within
        them.
      pool: donated.
    """
    mesh, replicated = decoder.mesh, PartitionSpec()
    pools = pool_specs(mesh, pool)
    local = jax.shard_map(
        partial(_advance_local, decoder, sampling, cache_length),
        mesh=mesh.mesh,
        in_specs=(
            _policy_specs(decoder),
            pools,
            sampler_state_specs(mesh, sampler_state),
            StepLimits(replicated, replicated, over_slots(mesh)),
        ),
        out_specs=(pools, replicated),
    )
    return local(policy, pool, sampler_state, limits)


def _advance_local(
    decoder: Decoder,
    sampling: Sampling,
    cache_length: int,
    policy: UnstackedPolicy[Array],
    pool: SlotPool[Array],
    sampler_state: SamplerState,
    limits: StepLimits[Array],
) -> tuple[SlotPool[Array], Advanced]:
    slots = limits.slots
    if slots is not None:
        # Gathered once for all steps, whose cost is proportional to the number of rows.
        gathered, sampler_state = _gather_slots(slots, pool, sampler_state)
        all_gathered = replace(limits, slots=None)
        gathered, advanced = _advance_local(
            decoder, sampling, cache_length, policy, gathered, sampler_state, all_gathered
        )
        return _scatter_slots(slots, pool, gathered), advanced
    config, mesh = decoder.config, decoder.mesh
    layers, rest = vary((policy.layers, policy.rest), mesh.axes)

    def count(live):
        # The same on every device: all leave the loop in the same step, as its body has
        # collectives.
        return all_sum(jnp.sum(live.astype(jnp.int32)), mesh.except_sequence)

    def step(loop: _Loop) -> _Loop:
        rows = loop.rows
        # The last token of a live row has not been run: this step writes its keys and values.
        last = jnp.maximum(rows.lengths - 1, 0)
        tokens = jnp.take_along_axis(rows.tokens, last[:, None], axis=1)[:, 0]
        logits, cache, choices = decode_step(
            layers,
            rest,
            loop.cache,
            StepTokens(tokens, last, loop.live),
            config,
            mesh,
            decoder.records_choices,
            rope,
        )
        if rows.choices is not None:
            rows = replace(rows, choices=write_token(rows.choices, loop.live, last, choices))
        sampled = sample_next_tokens(decoder, sampling, logits, pool, rows, sampler_state)
        rows, live = append_tokens(decoder, pool, rows, loop.live, sampled, sampler_state.version)
        # The number of rows live before the step: the token that ends a row is part of it.
        row_steps = loop.row_steps + loop.num_live
        return _Loop(loop.steps + 1, count(live), row_steps, rows, live, cache)

    # A shorter cache is copied once, so that no step reads unused positions; the whole is not.
    read = over_columns(partial(_slice_cache, cache_length), pool.cache)
    # RoPE tables are computed here once; otherwise each layer would compute them in each step.
    rope = vary(rotary_tables(cache_length, config), mesh.axes)
    zero = jnp.zeros((), jnp.int32)
    # A loop keeps the types of its carry: results that vary over devices must do so from the start.
    rows, live = vary((pool.rows, pool.live), mesh.except_sequence)
    loop = _Loop(zero, count(live), zero, rows, live, vary(read, mesh.axes))
    loop = jax.lax.while_loop(
        lambda loop: (loop.steps < limits.max_steps) & (loop.num_live > limits.min_live),
        step,
        loop,
    )
    cache = over_columns(_update_cache, pool.cache, loop.cache)
    pool = replace(pool, rows=loop.rows, live=loop.live, cache=cache)
    return pool, Advanced(loop.steps, loop.row_steps)


def _gather_slots(
    slots: Array, pool: SlotPool[Array], sampler_state: SamplerState
) -> tuple[SlotPool[Array], SamplerState]:
    """Gathers the given slots of a rank, with their sampling parameters."""

    def take(x: Array, axis: int = 0) -> Array:
        return jnp.take(x, slots, axis, mode="clip", unique_indices=True)

    # Rows are on another axis in the cache than in the other arrays.
    cache = jax.tree.map(lambda x: take(x, x.ndim + ROW), pool.cache)
    gathered = jax.tree.map(take, replace(pool, cache=Cache((), ())))
    return replace(gathered, cache=cache), sampler_state._replace(
        rows=jax.tree.map(take, sampler_state.rows)
    )


def _scatter_slots(
    slots: Array, pool: SlotPool[Array], gathered: SlotPool[Array]
) -> SlotPool[Array]:
    def scatter(old: Array, new: Array, axis: int = 0) -> Array:
        target = old.at[*[slice(None)] * axis, slots]
        return target.set(new, mode="clip", unique_indices=True)

    cache = jax.tree.map(lambda x, new: scatter(x, new, x.ndim + ROW), pool.cache, gathered.cache)
    no_cache = Cache[Array]((), ())
    rest = jax.tree.map(scatter, replace(pool, cache=no_cache), replace(gathered, cache=no_cache))
    return replace(rest, cache=cache)


def _slice_cache(cache_length: int, buffer: Array, axis: int | None) -> Array:
    if axis is None:
        return buffer
    return jax.lax.slice_in_dim(buffer, 0, cache_length, axis=axis)


def _update_cache(buffer: Array, new: Array, axis: int | None) -> Array:
    if axis is None:
        return new
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, 0, axis=axis)
