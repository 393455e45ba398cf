"""Decoding slots: what stands in them, and where that lives on the mesh.

A row begins in column 0 of its slot, so its token at position p is in column p; rows stand at
different positions.
"""

from dataclasses import replace
from functools import cache as remembered
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from moe.attention.delta.weights import DeltaNet
from moe.attention.latent import keeps_narrow
from moe.cache.buffers import ROW, Cache, over_columns
from moe.config import ModelConfig
from moe.decoding import Prefilled, prefill
from moe.layers.depth import is_stack, parts_of
from moe.placement import specs
from moe.router.replay import choices_dtype
from moe.weights import Transformer, cast_shapes, initialise
from sharding.collectives import vary
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
      top_logprobs: likeliest tokens that are kept of each place, with their log-probabilities.
    """

    config: ModelConfig
    mesh: FoldedMesh
    pad_id: int
    stop_ids: tuple[int, ...]
    records_choices: bool = False
    top_logprobs: int = 0

    def for_any_routing(self) -> "Decoder":
        """The same with room for any routing where prompts run (`Execution.buffer_factor`)."""
        return self._replace(config=self.config.for_any_routing())


@struct.dataclass
class Likeliest(Generic[Leaf]):
    """The likeliest tokens of places, the likeliest first.

    Attributes:
      tokens: ``[..., k]`` ids.
      logprobs: ``[..., k]`` in the whole policy, nats.
    """

    tokens: Leaf
    logprobs: Leaf


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
      likeliest: ``[row, column, k]`` of the places whose rows asked for it, rubbish elsewhere; None
        where `Decoder.top_logprobs` is 0.
    """

    lengths: Leaf
    starts: Leaf
    tokens: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None
    likeliest: Likeliest[Leaf] | None = None


@struct.dataclass
class Pool(Generic[Leaf]):
    """The slots, a row of tokens in each.

    Attributes:
      rows: what is written in them. The last token of a live row has not been run yet.
      cache: keys and values of the tokens before it, or what Gated DeltaNet keeps of them.
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
    decoder = decoder.for_any_routing()
    config, mesh = decoder.config, decoder.mesh
    # A prefill says what a cache of this network is made of; the smallest there is, one row for
    # each rank of dp and a token for each of tp, and only its shapes.
    like = jax.eval_shape(
        partial(prefilled, decoder),
        cast_shapes(config),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp), mesh.size(mesh.tp)), jnp.int32),
        jax.ShapeDtypeStruct((mesh.size(mesh.dp),), jnp.int32),
    )

    def make() -> Pool[Array]:
        choices = None
        if like.choices is not None:
            _, _, layers, k = like.choices.shape
            choices = jnp.full((slots, columns, layers, k), config.num_experts, like.choices.dtype)

        def empty(x: Any, column: int | None) -> Array:
            # The same axes with other sizes: rows are slots, and columns as many as a row may have.
            shape = list(x.shape)
            shape[ROW] = slots
            if column is not None:
                shape[column] = columns
            return jnp.zeros(shape, x.dtype)

        likeliest = None
        if decoder.top_logprobs:
            shape = slots, columns, decoder.top_logprobs
            likeliest = Likeliest(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        cache = over_columns(empty, like.cache)
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
            likeliest=likeliest,
        )
        states = jnp.zeros((slots, config.d_model), like.states.dtype)
        live = jnp.zeros(slots, bool)
        return Pool(rows, cache, states, live, nothing, nothing, nothing, nothing)

    abstract = jax.eval_shape(make)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), pool_specs(mesh, abstract))
    # Leaves and not the record: in the place of fields that are None JAX would put a marker, which
    # no record can hold.
    leaves, structure = jax.tree.flatten(placed)
    made = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=leaves)
    described = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        placed,
    )
    return lambda: structure.unflatten(made()), described


def pool_specs(mesh: FoldedMesh, pool: Pool[Any]) -> Pool[PartitionSpec]:
    """Where a pool lives: slots over ``dp``, heads over ``tp``."""
    rows = over_slots(mesh)
    # A row lives on one dp rank, with its keys and values by heads on those of tp.
    whole = jax.tree.map(lambda _: rows, pool)
    return replace(whole, cache=jax.tree.map(lambda x: _over_heads(x.ndim, mesh), pool.cache))


def cache_specs(decoder: Decoder) -> Cache[PartitionSpec]:
    """Where the cache of a pool lives."""
    config = decoder.config
    # Which layers have Gated DeltaNet, and which are stacks, their weights say: abstract ones do.
    parts = jax.eval_shape(lambda: parts_of(initialise(config, jax.random.key(0)), config))
    spread = [
        (isinstance(part.attention, DeltaNet), _over_heads(is_stack(part) - ROW, decoder.mesh))
        for part in parts
    ]
    heads = tuple(spec for is_delta, spec in spread if not is_delta)
    deltas = tuple(spec for is_delta, spec in spread if is_delta)
    return Cache(heads, () if keeps_narrow(config) else heads, deltas, deltas)


def _over_heads(ndim: int, mesh: FoldedMesh) -> PartitionSpec:
    """Where keys, values and states live; layers may lie in front."""
    # Rows, then heads, whatever lies before and after them.
    return PartitionSpec(*[None] * (ndim + ROW), mesh.except_sequence, mesh.sequence)


@partial(jax.jit, donate_argnums=0)
def halt(pool: Pool[Array], goes_on: Bool[Array, "slot"]) -> Pool[Array]:
    """The pool in which no other rows are live than those that go on."""
    return replace(pool, live=pool.live & goes_on)


def with_columns(pool: Pool[Array], columns: int) -> Pool[Array]:
    """The pool with so many columns in its cache: the first ones, and zeros after them."""
    return replace(pool, cache=_resized(pool.cache, columns))


@partial(jax.jit, static_argnums=1)
def _resized(cache: Cache[Array], columns: int) -> Cache[Array]:
    def resized(buffer: Array, axis: int | None) -> Array:
        if axis is None:
            return buffer
        kept = jax.lax.slice_in_dim(buffer, 0, min(columns, buffer.shape[axis]), axis=axis)
        more = [(0, 0)] * buffer.ndim
        more[axis] = 0, columns - kept.shape[axis]
        return jnp.pad(kept, more)

    return over_columns(resized, cache)


def prefilled(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    """`moe.decoding.prefill` on global arrays, with room for any routing."""
    decoder = decoder.for_any_routing()
    mesh = decoder.mesh
    rows = over_slots(mesh)
    heads: Any = cache_specs(decoder)
    spread: Any = rows

    def local(weights: Transformer[Array], tokens: Array, lengths: Array) -> Prefilled:
        return prefilled_local(decoder, vary(weights, mesh.axes), tokens, lengths)

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(decoder.config, mesh), rows, rows),
        out_specs=Prefilled(heads, spread, spread),
    )(weights, tokens, lengths)


def prefilled_local(
    decoder: Decoder, weights: Transformer[Array], tokens: Array, lengths: Array
) -> Prefilled:
    config, mesh = decoder.config, decoder.mesh
    ran = prefill(weights, tokens, lengths, config, mesh, decoder.records_choices)
    choices = ran.choices
    if choices is not None:
        # A byte where the number of experts allows: there is one for each token, layer and choice.
        choices = choices.astype(choices_dtype(config.num_experts))
    return ran._replace(cache=vary(ran.cache, mesh.axes), choices=choices)
