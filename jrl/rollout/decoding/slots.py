"""Decoding slots: the pool of rows and their KV cache, its sharding on the mesh, the next token of
each row, and the output buffer of finished rows.

A row starts in column 0 of its slot, so its token at position p is in column p; the rows of a pool
have different lengths.
"""

from dataclasses import dataclass, replace
from functools import cache as remembered
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jrl.losses import EntropyStatistics
from jrl.rollout.adjustments import adjust_logits
from jrl.rollout.sampling import RowSampling, Sampling, row_keys, sample_rows, sample_tokens
from jrl.rollout.threefry import keys_of
from moe.attention.latent import caches_latent
from moe.cache import ROW, Cache, over_columns
from moe.config import Model, ModelConfig
from moe.decoding import step_config
from moe.layers.depth import is_stack, split_layer_groups
from moe.model import Prefilled, prefill
from moe.placement import specs
from moe.router.routing import choices_dtype
from moe.weights import DeltaNet, Transformer, cast_shapes, shapes
from sharding.collectives import join_shards, local_shard, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import abstract_array, jit_onto, jit_sharded, named_shardings

Leaf = TypeVar("Leaf")


class Decoder(NamedTuple):
    """Static settings of decoding, known at compile time.

    Args:
      config: the policy network.
      mesh: the rollout mesh.
      pad_id: id of padding.
      stop_ids: each of them ends a response, of which it is the last token.
      records_choices: true to record the expert ids of each token.
      top_logprobs: number of top tokens recorded for each position, with their log-probabilities.
    """

    config: ModelConfig
    mesh: FoldedMesh
    pad_id: int
    stop_ids: tuple[int, ...]
    records_choices: bool = False
    top_logprobs: int = 0

    @property
    def model(self) -> Model:
        return Model(self.config, self.mesh)

    @property
    def step_config(self) -> ModelConfig:
        """Configuration of the layer groups of decode steps and of the cache."""
        return step_config(self.model)

    @property
    def overlaps(self) -> bool:
        """True if its programs may overlap communication (`sharding.sharded_jit.MeshJit`)."""
        return self.config.execution.overlaps

    def for_any_routing(self) -> "Decoder":
        """Copy with dropless expert buffers in prefill (`Execution.buffer_factor`)."""
        return self._replace(config=self.config.for_any_routing())


@struct.dataclass
class TopTokens(Generic[Leaf]):
    """Top-k tokens of each position, the most probable first.

    Attributes:
      tokens: ``[..., k]`` ids.
      logprobs: ``[..., k]`` log-probabilities in the full policy, nats.
    """

    tokens: Leaf
    logprobs: Leaf


@struct.dataclass
class TokenRows(Generic[Leaf]):
    """Prompts and responses, ``[row, column]`` except for the first two, each from column 0 on.

    Attributes:
      lengths: ``[row]`` tokens so far, including the prompt.
      starts: ``[row]`` the column of the first token sampled here.
      tokens: ids.
      behaviour_logprobs: log-probabilities in the distribution sampled from (top-k, top-p,
        temperature), nats; 0 if the token was not sampled here.
      old_logprobs: log-probabilities in the full policy that sampled, nats; likewise.
      versions: versions of the weights that sampled.
      choices: ``[row, column, layer, k]`` expert ids of the token, `num_experts` if it was not run;
        None if they are not recorded.
      top_tokens: ``[row, column, k]`` top tokens of rows that requested them, arbitrary values
        elsewhere; None if `Decoder.top_logprobs` is 0.
    """

    lengths: Leaf
    starts: Leaf
    tokens: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None
    top_tokens: TopTokens[Leaf] | None = None


@struct.dataclass
class RecentTokens(Generic[Leaf]):
    """Latest positions of rows, ``[slot, width]``, from the first that was not returned yet."""

    tokens: Leaf
    logprobs: Leaf
    top_tokens: TopTokens[Leaf] | None


@struct.dataclass
class SlotPool(Generic[Leaf]):
    """State of the decoding slots, a row of tokens in each.

    Attributes:
      rows: the tokens and their records. The last token of a live row has not been run yet.
      cache: KV cache of the tokens before it, or the states of Gated DeltaNet.
      states: ``[slot, d_model]`` the last hidden state of the row's prefill.
      live: ``[slot]`` true if the row is decoded further.
      limits: ``[slot]`` length at which a row stops if no stop token ends it.
      responses: ``[slot]`` the column where the response starts, from which the positions of RNG
        keys are counted.
      prompts: ``[slot]`` id of the row's prompt.
      samples: ``[slot]`` sample id, the index of the response to its prompt.
    """

    rows: TokenRows[Leaf]
    cache: Cache[Leaf]
    states: Leaf
    live: Leaf
    limits: Leaf
    responses: Leaf
    prompts: Leaf
    samples: Leaf


@dataclass
class OutputBuffer:
    """Output buffer of finished rows on the rollout mesh, until a batch is made of them.

    Attributes:
      decoder: compile-time settings of their decoding.
      rows: copied from their slots.
      used: number of rows in use; the others are free.
    """

    decoder: Decoder
    rows: TokenRows[Array]
    used: int = 0

    def __len__(self) -> int:
        return self.rows.lengths.shape[0]


def ranks(mesh: FoldedMesh) -> int:
    """Number of ranks, dp x tp, that must divide the rows to decode."""
    return mesh.size((*mesh.dp, *mesh.tp))


def check_slots(mesh: FoldedMesh, slots: int) -> None:
    """Checks that slots can decode on a mesh.

    Raises:
      ValueError: on pipeline stages, and for slots that do not divide over the ranks.
    """
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} cannot decode: every device needs all layers, so pp must be 1; "
            "decode on a separate layout."
        )
    if slots < 1 or slots % ranks(mesh):
        raise ValueError(
            f"slots={slots} must be a multiple of dp x tp = {ranks(mesh)} of layout {mesh.layout}."
        )


def over_slots(mesh: FoldedMesh) -> PartitionSpec:
    """Partition spec of arrays with a row per slot."""
    return PartitionSpec(mesh.except_sequence)


def empty_pool(decoder: Decoder, slots: int, max_length: int) -> SlotPool[Array]:
    """Creates a pool in which no row is live, for rows of at most `max_length` tokens."""
    return _build_pool_functions(decoder, slots, max_length)[0]()


def abstract_pool(decoder: Decoder, slots: int, max_length: int) -> SlotPool[Any]:
    """Shapes, dtypes and shardings of `empty_pool`, without allocating it."""
    return _build_pool_functions(decoder, slots, max_length)[1]


@remembered
def _build_pool_functions(
    decoder: Decoder, slots: int, max_length: int
) -> tuple[Any, SlotPool[Any]]:
    decoder = decoder.for_any_routing()
    config, mesh = decoder.config, decoder.mesh
    # The structure of the cache is taken from the shapes of a minimal prefill, with one row for
    # each rank of dp and a token for each of tp.
    prefill_shapes = jax.eval_shape(
        partial(run_prefill, decoder),
        cast_shapes(config),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp), mesh.size(mesh.tp)), jnp.int32),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp),), jnp.int32),
    )

    def make() -> SlotPool[Array]:
        choices = None
        if prefill_shapes.choices is not None:
            _, _, layers, k = prefill_shapes.choices.shape
            choices = jnp.full(
                (slots, max_length, layers, k), config.num_experts, prefill_shapes.choices.dtype
            )

        def empty(x: Any, column: int | None) -> Array:
            # The same axes with other sizes: one row per slot, and the maximum length of a row.
            shape = list(x.shape)
            shape[ROW] = slots
            if column is not None:
                shape[column] = max_length
            return jnp.zeros(shape, x.dtype)

        top_tokens = None
        if decoder.top_logprobs:
            shape = slots, max_length, decoder.top_logprobs
            top_tokens = TopTokens(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        cache = over_columns(empty, prefill_shapes.cache)
        zeros = jnp.zeros(slots, jnp.int32)
        of_tokens = jnp.zeros((slots, max_length), jnp.float32)
        rows = TokenRows(
            lengths=zeros,
            starts=zeros,
            tokens=jnp.full((slots, max_length), decoder.pad_id, jnp.int32),
            behaviour_logprobs=of_tokens,
            old_logprobs=of_tokens,
            versions=jnp.zeros((slots, max_length), jnp.int32),
            choices=choices,
            top_tokens=top_tokens,
        )
        states = jnp.zeros((slots, config.d_model), prefill_shapes.states.dtype)
        live = jnp.zeros(slots, bool)
        return SlotPool(rows, cache, states, live, zeros, zeros, zeros, zeros)

    abstract = jax.eval_shape(make)
    shardings = named_shardings(pool_specs(mesh, abstract), mesh)
    return jit_sharded(make, shardings), jax.tree.map(abstract_array, abstract, shardings)


def pool_specs(mesh: FoldedMesh, pool: SlotPool[Any]) -> SlotPool[PartitionSpec]:
    """Partition specs of a pool: slots over ``dp``, heads over ``tp``."""
    rows = over_slots(mesh)
    # A row is on one dp rank, its keys and values sharded by heads over tp.
    sharded = jax.tree.map(lambda _: rows, pool)
    return replace(sharded, cache=jax.tree.map(lambda x: _over_heads(x.ndim, mesh), pool.cache))


def cache_specs(decoder: Decoder) -> Cache[PartitionSpec]:
    """Partition specs of the cache of a pool."""
    config = decoder.step_config
    # Abstract weights determine which layers have Gated DeltaNet, and which are stacks.
    layers = jax.eval_shape(partial(split_layer_groups, config=config), shapes(config))
    layer_specs = [
        (isinstance(layer.attention, DeltaNet), _over_heads(is_stack(layer) - ROW, decoder.mesh))
        for layer in layers
    ]
    heads = tuple(spec for is_delta, spec in layer_specs if not is_delta)
    deltas = tuple(spec for is_delta, spec in layer_specs if is_delta)
    return Cache(heads, () if caches_latent(config) else heads, deltas, deltas)


def prefilled_specs(mesh: FoldedMesh, cache: Any) -> Any:
    """Partition specs of the result of a prefill; `cache` are the specs of its cache."""
    rows: Any = over_slots(mesh)
    replicated: Any = PartitionSpec()
    return Prefilled(cache, rows, rows, replicated)


def _over_heads(ndim: int, mesh: FoldedMesh) -> PartitionSpec:
    """Partition spec of keys, values and states, with or without leading layer axes."""
    # Rows, then heads, whatever axes are before and after them.
    return PartitionSpec(*[None] * (ndim + ROW), mesh.except_sequence, mesh.sequence)


@partial(jax.jit, donate_argnums=0)
def halt(pool: SlotPool[Array], stays_live: Bool[Array, "slot"]) -> SlotPool[Array]:
    """Pool in which only rows of the mask `stays_live` stay live."""
    return replace(pool, live=pool.live & stays_live)


def with_cache_length(pool: SlotPool[Array], length: int) -> SlotPool[Array]:
    """Pool whose cache is truncated or zero-padded to `length`."""
    return replace(pool, cache=_resize(pool.cache, length))


def without_cache(pool: SlotPool[Array]) -> SlotPool[Array]:
    """Pool whose cache has no buffers, for functions that handle the cache separately."""
    return replace(pool, cache=Cache((), ()))


@partial(jax.jit, static_argnums=1)
def _resize(cache: Cache[Array], length: int) -> Cache[Array]:
    def resize(buffer: Array, axis: int | None) -> Array:
        if axis is None:
            return buffer
        sliced = jax.lax.slice_in_dim(buffer, 0, min(length, buffer.shape[axis]), axis=axis)
        more = [(0, 0)] * buffer.ndim
        more[axis] = 0, length - sliced.shape[axis]
        return jnp.pad(sliced, more)

    return over_columns(resize, cache)


def run_prefill(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    """Runs `moe.model.prefill` on global arrays, with dropless expert buffers."""
    decoder = decoder.for_any_routing()
    mesh, rows = decoder.mesh, over_slots(decoder.mesh)
    return jax.shard_map(
        partial(run_prefill_local, decoder),
        mesh=mesh.mesh,
        in_specs=(specs(decoder.model), rows, rows),
        out_specs=prefilled_specs(mesh, cache_specs(decoder)),
    )(weights, tokens, lengths)


def run_prefill_local(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    config, mesh = decoder.config, decoder.mesh
    weights = vary(weights, mesh.axes)
    output = prefill(
        weights, tokens, lengths, decoder.model, decoder.records_choices, decoder.step_config
    )
    choices = output.choices
    if choices is not None:
        # One byte each if the number of experts allows, as there are tokens x layers x k ids.
        choices = choices.astype(choices_dtype(config.num_experts))
    return output._replace(cache=vary(output.cache, mesh.axes), choices=choices)


class SamplerState(NamedTuple):
    """Sampler state of the next tokens, on every device.

    Attributes:
      key: data of the RNG key from which the keys of all tokens are derived.
      version: version of the weights.
      entropy: statistics of the step before, for an adaptive temperature.
      rows: per-request sampling parameters, sharded over the slots; None if all rows share one
        `Sampling`.
      greedy: ``[]`` true to take the argmax, see `jrl.rollout.sampling.sample_tokens`.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None
    rows: RowSampling[Array] | None = None
    greedy: Array | None = None


def sampler_state_specs(mesh: FoldedMesh, sampler_state: SamplerState) -> Any:
    """Partition specs of the sampler state."""
    specs = jax.tree.map(lambda _: PartitionSpec(), sampler_state)
    return specs._replace(rows=jax.tree.map(lambda _: over_slots(mesh), sampler_state.rows))


def _sample(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    sampler_state: SamplerState,
) -> tuple[Array, Array, Array, TopTokens[Array] | None]:
    """Samples the next token of each row, the same on every rank of ``tp``: ids, the two
    log-probabilities of `TokenRows`, and the top-k tokens of the position or None."""
    # Each rank of tp samples for its shard of the rows, of which it has all logits; then tokens are
    # all-gathered.
    key, axes = keys_of(sampler_state.key), decoder.mesh.sequence
    samples = local_shard(pool.samples, axes)
    # Counted from the start of the response, so that a resumed row uses the same RNG keys as an
    # uninterrupted one.
    positions = local_shard(rows.lengths - pool.responses, axes)
    top_tokens = None
    if sampler_state.rows is None:
        keys = row_keys(key, local_shard(pool.prompts, axes), samples, positions)
        entropy, greedy = vary((sampler_state.entropy, sampler_state.greedy), decoder.mesh.axes)
        sampled = sample_tokens(logits, sampling, keys, entropy, greedy)
    else:
        row_sampling = jax.tree.map(lambda x: local_shard(x, axes), sampler_state.rows)
        keys = row_keys(key, *row_sampling.seeds.T, samples, positions)
        adjusted = None
        if row_sampling.adjustments is not None:
            history = rows.tokens, pool.responses, rows.lengths
            history = (local_shard(x, axes) for x in history)
            adjusted = adjust_logits(logits, row_sampling.adjustments, *history)
        sampled = sample_rows(logits, row_sampling, keys, adjusted)
        if decoder.top_logprobs:
            top_tokens = _top_k_tokens(logits, row_sampling.needs_top_tokens, decoder.top_logprobs)
    return jax.tree.map(lambda x: join_shards(x, axes), (*sampled, top_tokens))


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


def append_next_tokens(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    grows: Array,
    sampler_state: SamplerState,
) -> tuple[TokenRows[Array], Array]:
    """Samples the next tokens, from the logits of this rank's shard of the rows, and appends them
    to the rows in the mask `grows`; returns the rows, and the mask of those that continue."""
    token, behaviour, old, top_tokens = _sample(
        decoder, sampling, logits, pool, rows, sampler_state
    )

    def append(into: Array, new: Array) -> Array:
        return write_token(into, grows, rows.lengths, new)

    # Per token, not per row: a row in flight may continue with newer weights.
    versions = jnp.broadcast_to(sampler_state.version.astype(jnp.int32), token.shape)
    longer = replace(
        rows,
        lengths=rows.lengths + grows.astype(jnp.int32),
        tokens=append(rows.tokens, token),
        behaviour_logprobs=append(rows.behaviour_logprobs, behaviour),
        old_logprobs=append(rows.old_logprobs, old),
        versions=append(rows.versions, versions),
    )
    if top_tokens is not None:
        longer = replace(longer, top_tokens=jax.tree.map(append, rows.top_tokens, top_tokens))
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


@partial(jax.jit, static_argnums=1)
def recent_tokens(
    rows: TokenRows[Array], width: int, starts: Int[Array, "slot"]
) -> RecentTokens[Array]:
    """Slices `width` positions of each row from its own start; the last one repeats past the
    end."""
    positions = starts[:, None] + jnp.arange(width)[None]

    def gather(column: Array) -> Array:
        index = positions.reshape(*positions.shape, *[1] * (column.ndim - 2))
        return jnp.take_along_axis(column, index, axis=1, mode="clip")

    return RecentTokens(
        gather(rows.tokens), gather(rows.old_logprobs), jax.tree.map(gather, rows.top_tokens)
    )


@jax.jit
def row_of(values: Array, slot: Int[Array, ""]) -> Array:
    """The values of one slot."""
    return jax.lax.dynamic_index_in_dim(values, slot, keepdims=False)


def make_output_buffer(
    rows: TokenRows[Array], size: int, sharding: NamedSharding
) -> TokenRows[Array]:
    """Empty output buffer for `size` rows such as these."""
    leaves, structure = jax.tree.flatten(rows)
    return structure.unflatten(
        _compiled_zeros(sharding, size, tuple((x.shape[1:], x.dtype) for x in leaves))()
    )


@remembered
def _compiled_zeros(sharding: NamedSharding, size: int, leaves: tuple[tuple[Any, Any], ...]) -> Any:
    return jax.jit(
        lambda: [jnp.zeros((size, *shape), dtype) for shape, dtype in leaves],
        out_shardings=sharding,
    )


def write_to_buffer(
    buffer: TokenRows[Array], rows: TokenRows[Array], destinations: Array, sharding: NamedSharding
) -> TokenRows[Array]:
    """Copies rows of a pool into the output buffer.

    Args:
      buffer: the buffer, donated.
      destinations: ``[slot]`` destination of each slot's row, unique; past the end drops it.
      sharding: sharding of the buffer.
    """
    return _compiled_write(sharding)(buffer, rows, destinations)


@remembered
def _compiled_write(sharding: NamedSharding) -> Any:
    def write(buffer, rows, destinations):
        return jax.tree.map(
            lambda into, new: into.at[destinations].set(new, mode="drop", unique_indices=True),
            buffer,
            rows,
        )

    return jit_onto(write, sharding, donate_argnums=0)
