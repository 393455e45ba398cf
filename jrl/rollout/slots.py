"""Decoding slots: what stands in them, on the mesh, and the programs that fill and advance them.

`admit` runs the tokens of new rows into free slots, `advance` samples tokens for all rows that are
live, and `shelve` copies rows that are done to where a batch is made of them. A row begins in
column 0 of its slot, so its token at position p is in column p; rows stand at different positions.
"""

from dataclasses import replace
from functools import cache as remembered
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from jrl.losses import EntropyStatistics
from jrl.rollout.sampling import Sampling, draw
from moe.config import ModelConfig
from moe.decoding import Cache, Prefilled, decode_step, prefill
from moe.head import logits_of
from moe.model import layer_of
from moe.placement import specs
from moe.weights import Layer, Transformer, shapes
from sharding.collectives import all_sum, join_shards, own_shard, vary
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


class Decoder(NamedTuple):
    """What decoding needs to know at compile time.

    Args:
      config: the policy network.
      mesh: where it lives.
      pad_id: fills what is not a token.
      stop_ids: each of them ends a response, of which it is the last token.
      records_choices: whether the experts of each token are kept.
    """

    config: ModelConfig
    mesh: FoldedMesh
    pad_id: int
    stop_ids: tuple[int, ...]
    records_choices: bool = False


@struct.dataclass
class Rows(Generic[Leaf]):
    """Prompts and responses, ``[row, column]`` but for the first two, each from column 0 on.

    Attributes:
      lengths: ``[row]`` tokens so far, those of the prompt included.
      starts: ``[row]`` the column of the first token sampled here.
      tokens: ids.
      behaviour_logprobs: in the distribution drawn from (top-k, top-p, temperature), nats; 0 where
        nothing was sampled here.
      old_logprobs: in the whole policy that sampled, nats; likewise.
      versions: of the weights that sampled.
      choices: ``[row, column, layer, k]`` experts that the token chose, `num_experts` where it was
        not run; None where they are not recorded.
    """

    lengths: Leaf
    starts: Leaf
    tokens: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None


@struct.dataclass
class Pool(Generic[Leaf]):
    """The slots, a row of tokens in each.

    Attributes:
      rows: what is written in them. The last token of a live row has not been run yet.
      cache: keys and values of the tokens before it.
      states: ``[slot, d_model]`` the last hidden state after the tokens that the row came with.
      live: ``[slot]`` whether a row goes on when the pool advances.
      limits: ``[slot]`` length at which a row stops if no stop token ends it.
      responses: ``[slot]`` the column where the response begins: tokens are numbered from there.
      prompts: ``[slot]`` number of the row's prompt.
      samples: ``[slot]`` which of the prompt's responses it is.
    """

    rows: Rows[Leaf]
    cache: Cache[Leaf]
    states: Leaf
    live: Leaf
    limits: Leaf
    responses: Leaf
    prompts: Leaf
    samples: Leaf


@struct.dataclass
class Carried(Generic[Leaf]):
    """What arriving rows hold of the samplers that they had before, as in `Rows`.

    Attributes:
      starts: ``[slot]``.
      behaviour_logprobs, old_logprobs, versions: ``[slot, width]``.
      choices: ``[slot, width, layer, k]`` or None; `num_experts` takes what the row's run chooses.
    """

    starts: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None


@struct.dataclass
class Arrivals(Generic[Leaf]):
    """Rows that come into slots, an entry per slot.

    Attributes:
      sources: ``[slot]`` whose keys and values the row begins with: the number of one of the rows
        that are run now on the slot's rank or, where none are run, that of another of its slots,
        which begins with the same tokens; -1 where nothing arrives.
      tokens: ``[slot, width]`` ids of prompt and response so far.
      lengths: ``[slot]`` how many they are.
      limits, responses, prompts, samples: as in `Pool`.
      carried: None where nothing was sampled of any of them.
    """

    sources: Leaf
    tokens: Leaf
    lengths: Leaf
    limits: Leaf
    responses: Leaf
    prompts: Leaf
    samples: Leaf
    carried: Carried[Leaf] | None = None


class Advanced(NamedTuple):
    """What the host reads after `advance`, the same on every device.

    Attributes:
      steps: tokens that the longest-lived row got.
      row_steps: tokens that all rows got.
    """

    steps: Array
    row_steps: Array


@struct.dataclass
class Policy(Generic[Leaf]):
    """Weights as decoding reads them: every step reads all of them, so each layer's lie together.

    Attributes:
      layers: a record per layer.
      rest: everything else, without layers.
    """

    layers: tuple[Layer[Leaf], ...]
    rest: Transformer[Leaf]


def policy_of(decoder: Decoder, weights: Transformer[Array]) -> Policy[Array]:
    """The weights, taken apart once for all steps."""
    return _taking_apart(decoder)(weights)


@remembered
def _taking_apart(decoder: Decoder) -> Any:
    config, mesh = decoder.config, decoder.mesh
    leaves, structure = jax.tree.flatten(_policy_specs(decoder))
    placed = [NamedSharding(mesh.mesh, spec) for spec in leaves]

    def take_apart(weights: Transformer[Array]) -> list[Array]:
        layers = tuple(layer_of(weights, index) for index in range(config.num_layers))
        return jax.tree.leaves(Policy(layers, _without_layers(weights)))

    apart = jax.jit(take_apart, out_shardings=placed)
    return lambda weights: structure.unflatten(apart(weights))


def _policy_specs(decoder: Decoder) -> Policy[PartitionSpec]:
    stacked = specs(decoder.config, decoder.mesh)

    def of_layer(index: int) -> Layer[PartitionSpec]:
        first = stacked.first_layers
        dense = 0 if first is None else decoder.config.num_dense_layers
        stack = stacked.layers if first is None or index >= dense else first
        return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack)

    layers = tuple(of_layer(index) for index in range(decoder.config.num_layers))
    return Policy(layers, _without_layers(stacked))


def _without_layers(weights: Transformer[Leaf]) -> Transformer[Leaf]:
    nothing: Any = None
    return replace(weights, layers=nothing, first_layers=None)


def over_slots(mesh: FoldedMesh) -> PartitionSpec:
    """Where arrays with a row per slot live."""
    return PartitionSpec(mesh.except_sequence)


def empty_pool(decoder: Decoder, slots: int, columns: int) -> Pool[Array]:
    """A pool in which no row is live.

    Args:
      columns: tokens that a row has room for.
    """
    return _making(decoder, slots, columns)[0]()


def abstract_pool(decoder: Decoder, slots: int, columns: int) -> Pool[Any]:
    """Shapes, dtypes and shardings of `empty_pool`, without making it."""
    return _making(decoder, slots, columns)[1]


@remembered
def _making(decoder: Decoder, slots: int, columns: int) -> tuple[Any, Pool[Any]]:
    config, mesh = decoder.config, decoder.mesh
    like = jax.eval_shape(
        partial(_prefilled, decoder),
        shapes(config),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp), mesh.size(mesh.tp)), jnp.int32),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp),), jnp.int32),
    )

    def make() -> Pool[Array]:
        choices = None
        if like.choices is not None:
            _, _, layers, k = like.choices.shape
            choices = jnp.full((slots, columns, layers, k), config.num_experts, like.choices.dtype)
        cache = jax.tree.map(
            lambda x: jnp.zeros((slots, x.shape[1], columns, x.shape[3]), x.dtype), like.cache
        )
        nothing = jnp.zeros(slots, jnp.int32)
        of_columns = jnp.zeros((slots, columns), jnp.float32)
        rows = Rows(
            lengths=nothing,
            starts=nothing,
            tokens=jnp.full((slots, columns), decoder.pad_id, jnp.int32),
            behaviour_logprobs=of_columns,
            old_logprobs=of_columns,
            versions=jnp.zeros((slots, columns), jnp.int32),
            choices=choices,
        )
        states = jnp.zeros((slots, config.d_model), like.states.dtype)
        live = jnp.zeros(slots, bool)
        return Pool(rows, cache, states, live, nothing, nothing, nothing, nothing)

    abstract = jax.eval_shape(make)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), _pool_specs(mesh, abstract))
    leaves, structure = jax.tree.flatten(placed)
    made = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=leaves)
    described = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        placed,
    )
    return lambda: structure.unflatten(made()), described


def _pool_specs(mesh: FoldedMesh, pool: Pool[Any]) -> Pool[PartitionSpec]:
    """Where a pool lives: slots over ``dp``, heads over ``tp``."""
    rows = over_slots(mesh)
    whole = jax.tree.map(lambda _: rows, pool)
    heads = PartitionSpec(mesh.except_sequence, mesh.sequence)
    return replace(whole, cache=jax.tree.map(lambda _: heads, pool.cache))


class Draws(NamedTuple):
    """What the next tokens are drawn with, on every device.

    Attributes:
      key: data of the key from which every token's randomness comes.
      version: of the weights.
      entropy: of the step before, where a temperature adapts.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def admit(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: Pool[Array],
    tokens: Int[Array, "rows width"],
    lengths: Int[Array, "rows"],
    arrivals: Arrivals[Array],
    draws: Draws,
) -> Pool[Array]:
    """Runs rows of tokens, puts them into slots and samples the next token of each: a row that
    several slots begin with runs once.

    Args:
      pool: given up.
      tokens: rows to run, as many on each ``dp`` rank; 0 where all that arrives begins as a row
        that is there.
      lengths: tokens of each.
      arrivals: which slots begin with which.
    """
    mesh, whole = decoder.mesh, PartitionSpec()
    rows, pools = over_slots(mesh), _pool_specs(mesh, pool)
    local = jax.shard_map(
        partial(_admit_local, decoder, sampling),
        mesh=mesh.mesh,
        in_specs=(specs(decoder.config, mesh), pools, rows, rows, rows, whole),
        out_specs=pools,
    )
    return local(weights, pool, tokens, lengths, arrivals, draws)


def _admit_local(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: Pool[Array],
    tokens: Array,
    lengths: Array,
    arrivals: Arrivals[Array],
    draws: Draws,
) -> Pool[Array]:
    mesh = decoder.mesh
    weights = vary(weights, mesh.axes)
    pool = _placed(decoder, weights, pool, tokens, lengths, arrivals)
    # The first token comes from the state of the last that the row came with, every other from a
    # step of the network.
    states = own_shard(pool.states, mesh.sequence)
    logits = logits_of(weights, states, decoder.config, mesh)
    drawn = _drawn(decoder, sampling, logits, pool, pool.rows, draws)
    rows, going = _appended(decoder, pool, pool.rows, arrivals.sources >= 0, drawn, draws.version)
    return replace(pool, rows=rows, live=pool.live | going)


def _placed(
    decoder: Decoder,
    weights: Transformer[Array],
    pool: Pool[Array],
    tokens: Array,
    lengths: Array,
    arrivals: Arrivals[Array],
) -> Pool[Array]:
    """The pool with what arrives, not live yet."""
    width, ran = tokens.shape[1], None
    if tokens.shape[0]:
        ran = _prefilled_local(decoder, weights, tokens, lengths)
    arrives = arrivals.sources >= 0
    source = jnp.maximum(arrivals.sources, 0)

    def where_arriving(new: Array | float, own: Array) -> Array:
        there = arrives.reshape(-1, *[1] * (own.ndim - 1))
        return jnp.where(there, jnp.asarray(new, own.dtype), own)

    def begun(own: Array, ran: Array | None, axis: int) -> Array:
        """`own` where nothing arrives, else the first columns of what the row begins with."""
        there = jax.lax.slice_in_dim(own, 0, width, axis=axis)
        known = there if ran is None else ran
        new = where_arriving(jnp.take(known, source, axis=0), there)
        return jax.lax.dynamic_update_slice_in_dim(own, new, 0, axis=axis)

    rows = pool.rows
    room = rows.tokens.shape[1] - width
    written = jnp.pad(arrivals.tokens, ((0, 0), (0, room)), constant_values=decoder.pad_id)
    choices = rows.choices
    if choices is not None:
        known = begun(choices, None if ran is None else ran.choices, 1)
        # What the other row went on with is none of this one's.
        later = jnp.arange(written.shape[1])[None] >= arrivals.lengths[:, None]
        none = jnp.asarray(decoder.config.num_experts, known.dtype)
        if arrivals.carried is not None and arrivals.carried.choices is not None:
            before = _widened(arrivals.carried.choices, known.shape[1], none)
            known = jnp.where(arrives[:, None, None, None] & (before != none), before, known)
        choices = jnp.where((arrives[:, None] & later)[..., None, None], none, known)
    states = pool.states if ran is None else ran.states
    starts, columns = arrivals.lengths, (0.0, 0.0, 0)
    if arrivals.carried is not None:
        starts, own = arrivals.carried.starts, arrivals.carried
        given = own.behaviour_logprobs, own.old_logprobs, own.versions
        columns = tuple(_widened(column, written.shape[1], 0) for column in given)
    behaviour_logprobs, old_logprobs, versions = columns
    return Pool(
        rows=Rows(
            lengths=where_arriving(arrivals.lengths, rows.lengths),
            starts=where_arriving(starts, rows.starts),
            tokens=where_arriving(written, rows.tokens),
            behaviour_logprobs=where_arriving(behaviour_logprobs, rows.behaviour_logprobs),
            old_logprobs=where_arriving(old_logprobs, rows.old_logprobs),
            versions=where_arriving(versions, rows.versions),
            choices=choices,
        ),
        cache=jax.tree.map(lambda own, new: begun(own, new, 2), pool.cache, ran.cache)
        if ran is not None
        else jax.tree.map(lambda own: begun(own, None, 2), pool.cache),
        states=where_arriving(jnp.take(states, source, axis=0), pool.states),
        live=pool.live,
        limits=where_arriving(arrivals.limits, pool.limits),
        responses=where_arriving(arrivals.responses, pool.responses),
        prompts=where_arriving(arrivals.prompts, pool.prompts),
        samples=where_arriving(arrivals.samples, pool.samples),
    )


def _widened(x: Array, width: int, otherwise: Array | float) -> Array:
    """`x` with columns of `otherwise` after its own."""
    room = [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, room, constant_values=otherwise)


def _prefilled(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    """`moe.decoding.prefill` on global arrays."""
    mesh = decoder.mesh
    rows = over_slots(mesh)
    heads: Any = PartitionSpec(mesh.except_sequence, mesh.sequence)
    spread: Any = rows

    def local(weights: Transformer[Array], tokens: Array, lengths: Array) -> Prefilled:
        return _prefilled_local(decoder, vary(weights, mesh.axes), tokens, lengths)

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(decoder.config, mesh), rows, rows),
        out_specs=Prefilled(heads, spread, spread),
    )(weights, tokens, lengths)


def _prefilled_local(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    config, mesh = decoder.config, decoder.mesh
    ran = prefill(weights, tokens, lengths, config, mesh, decoder.records_choices)
    choices = ran.choices
    if choices is not None:
        choices = choices.astype(_choice_dtype(config))
    return ran._replace(cache=vary(ran.cache, mesh.axes), choices=choices)


def _choice_dtype(config: ModelConfig) -> Any:
    """The smallest integers that hold the experts and one number more."""
    return np.min_scalar_type(config.num_experts)


class _Loop(NamedTuple):
    """The carry of the decoding loop; `steps` counts tokens of the longest-lived row."""

    steps: Array
    num_live: Array
    row_steps: Array
    rows: Rows[Array]
    live: Array
    cache: Cache[Array]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def advance(
    decoder: Decoder,
    sampling: Sampling,
    columns: int,
    policy: Policy[Array],
    pool: Pool[Array],
    draws: Draws,
    max_steps: Array,
    min_live: Array,
) -> tuple[Pool[Array], Advanced]:
    """Samples tokens for all live rows, until so many are sampled or few enough rows are left.

    A token's randomness is of the key, the numbers of prompt and sample, and its place in the
    response: neither slot nor mesh nor what else is decoded has a say.

    Args:
      sampling: how tokens are drawn.
      columns: those of the cache that attention reads; every live row must end within them.
      pool: given up.
      max_steps: tokens per row at most.
      min_live: stops when no more than so many rows are live.
    """
    mesh, whole = decoder.mesh, PartitionSpec()
    pools = _pool_specs(mesh, pool)
    local = jax.shard_map(
        partial(_advance_local, decoder, sampling, columns),
        mesh=mesh.mesh,
        in_specs=(_policy_specs(decoder), pools, whole, whole, whole),
        out_specs=(pools, whole),
    )
    return local(policy, pool, draws, max_steps, min_live)


def _advance_local(
    decoder: Decoder,
    sampling: Sampling,
    columns: int,
    policy: Policy[Array],
    pool: Pool[Array],
    draws: Draws,
    max_steps: Array,
    min_live: Array,
) -> tuple[Pool[Array], Advanced]:
    config, mesh = decoder.config, decoder.mesh
    layers, rest = vary((policy.layers, policy.rest), mesh.axes)

    def count(live):
        return all_sum(jnp.sum(live.astype(jnp.int32)), mesh.except_sequence)

    def step(loop: _Loop) -> _Loop:
        rows = loop.rows
        last = jnp.maximum(rows.lengths - 1, 0)
        tokens = jnp.take_along_axis(rows.tokens, last[:, None], axis=1)[:, 0]
        logits, cache, choices = decode_step(
            layers,
            rest,
            loop.cache,
            tokens,
            last,
            loop.live,
            config,
            mesh,
            decoder.records_choices,
        )
        if rows.choices is not None:
            rows = replace(rows, choices=_written(rows.choices, loop.live, last, choices))
        drawn = _drawn(decoder, sampling, logits, pool, rows, draws)
        rows, live = _appended(decoder, pool, rows, loop.live, drawn, draws.version)
        row_steps = loop.row_steps + loop.num_live
        return _Loop(loop.steps + 1, count(live), row_steps, rows, live, cache)

    # A part is copied once, so that no step reads what no row has reached; the whole is not copied.
    read = jax.tree.map(lambda x: x[:, :, :columns], pool.cache)
    nothing = jnp.zeros((), jnp.int32)
    rows, live = vary((pool.rows, pool.live), mesh.except_sequence)
    loop = _Loop(nothing, count(live), nothing, rows, live, vary(read, mesh.axes))
    loop = jax.lax.while_loop(
        lambda loop: (loop.steps < max_steps) & (loop.num_live > min_live), step, loop
    )
    cache = jax.tree.map(
        lambda own, new: jax.lax.dynamic_update_slice_in_dim(own, new, 0, axis=2),
        pool.cache,
        loop.cache,
    )
    pool = replace(pool, rows=loop.rows, live=loop.live, cache=cache)
    return pool, Advanced(loop.steps, loop.row_steps)


def _drawn(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: Pool[Array],
    rows: Rows[Array],
    draws: Draws,
) -> tuple[Array, Array, Array]:
    """The next token of each row and its log-probabilities, the same on every rank of ``tp``.

    Args:
      logits: of this rank's shard of the rows.
    """
    key, axes = jax.random.wrap_key_data(draws.key), decoder.mesh.sequence

    def own_key(prompt: Array, sample: Array, place: Array) -> Array:
        of_row = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
        return jax.random.fold_in(of_row, place)

    numbers = pool.prompts, pool.samples, rows.lengths - pool.responses
    keys = jax.vmap(own_key)(*(own_shard(x, axes) for x in numbers))
    entropy = vary(draws.entropy, decoder.mesh.axes)
    token, behaviour, old = draw(logits, sampling, keys, entropy)
    return join_shards(token, axes), join_shards(behaviour, axes), join_shards(old, axes)


def _appended(
    decoder: Decoder,
    pool: Pool[Array],
    rows: Rows[Array],
    grows: Array,
    drawn: tuple[Array, Array, Array],
    version: Array,
) -> tuple[Rows[Array], Array]:
    """The rows, of which some grow by what was drawn, and which of those go on."""
    token, behaviour, old = drawn
    place = rows.lengths
    versions = jnp.broadcast_to(version.astype(jnp.int32), token.shape)
    longer = replace(
        rows,
        lengths=rows.lengths + grows.astype(jnp.int32),
        tokens=_written(rows.tokens, grows, place, token),
        behaviour_logprobs=_written(rows.behaviour_logprobs, grows, place, behaviour),
        old_logprobs=_written(rows.old_logprobs, grows, place, old),
        versions=_written(rows.versions, grows, place, versions),
    )
    # The token that ends a response is part of it.
    going = grows & (longer.lengths < pool.limits)
    for stop in decoder.stop_ids:
        going = going & (token != stop)
    return longer, going


def _written(into: Array, where: Array, column: Array, new: Array | None) -> Array:
    """`into` with `new` in a column of its own for each row, of some rows."""
    assert new is not None
    # Past the end, where writing does nothing.
    column = jnp.where(where, column, into.shape[1])
    return into.at[jnp.arange(into.shape[0]), column].set(
        new.astype(into.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )


@partial(jax.jit, donate_argnums=0)
def halt(pool: Pool[Array], goes_on: Bool[Array, "slot"]) -> Pool[Array]:
    """The pool in which no other rows are live than those that go on."""
    return replace(pool, live=pool.live & goes_on)


def empty_shelf(rows: Rows[Array], size: int, mesh: FoldedMesh) -> Rows[Array]:
    """Room for `size` rows such as these."""
    leaves, structure = jax.tree.flatten(rows)
    return structure.unflatten(
        _clearing(mesh, size, tuple((x.shape[1:], x.dtype) for x in leaves))()
    )


@remembered
def _clearing(mesh: FoldedMesh, size: int, leaves: tuple[tuple[Any, Any], ...]) -> Any:
    return jax.jit(
        lambda: [jnp.zeros((size, *shape), dtype) for shape, dtype in leaves],
        out_shardings=NamedSharding(mesh.mesh, over_slots(mesh)),
    )


def shelve(shelf: Rows[Array], rows: Rows[Array], places: Array, mesh: FoldedMesh) -> Rows[Array]:
    """The shelf with some of the rows of a pool on it.

    Args:
      shelf: given up.
      places: ``[slot]`` where each slot's row goes; past the end leaves it out.
    """
    return _shelving(mesh)(shelf, rows, places)


@remembered
def _shelving(mesh: FoldedMesh) -> Any:
    def place(shelf: Rows[Array], rows: Rows[Array], places: Array) -> Rows[Array]:
        return jax.tree.map(
            lambda into, new: into.at[places].set(new, mode="drop", unique_indices=True),
            shelf,
            rows,
        )

    return jax.jit(
        place, donate_argnums=0, out_shardings=NamedSharding(mesh.mesh, over_slots(mesh))
    )
