"""Backend of the engine on one mesh: the devices that decode, the policy on them, and the loop of
decoding steps, each of which samples and appends the next token of all live rows.

`jrl.rollout.decoding.split_backend` has another.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache as remembered
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import replicated
from jrl.rollout.decoding.packed_prompts import (
    CacheCopies,
    PackedScores,
    Packing,
    copy_to_cache,
    run_packed,
    score_packed,
)
from jrl.rollout.decoding.prefill import AdmissionArrays, admit, admit_prefilled
from jrl.rollout.decoding.scheduling.scheduler import ChooseSlot
from jrl.rollout.decoding.slots import (
    Decoder,
    SamplerState,
    SlotPool,
    TokenRows,
    append_next_tokens,
    check_slots,
    make_output_buffer,
    over_slots,
    pool_specs,
    sampler_state_specs,
    without_cache,
    write_to_buffer,
    write_token,
)
from jrl.rollout.resharding import rollout_policy, without_fsdp
from jrl.rollout.sampling import Sampling
from moe.attention.rotary import rotary_tables
from moe.cache import ROW, Cache, StepTokens, over_columns
from moe.config import Model
from moe.decoding import decode_step, keeps_expert_stack, step_config
from moe.layers.depth import map_layer_groups
from moe.model import Prefilled
from moe.placement import in_chunks, shardings, specs
from moe.router.statistics import run_with_fallback
from moe.weights import Experts, Layer, Transformer, cast_shapes, without_layers
from sharding.collectives import all_sum, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit, abstract_array, jit_onto, named_shardings

Leaf = TypeVar("Leaf")


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
      experts: matrices of the experts of all layers, stacked, which `layers` lack; None if layers
        have their own.
    """

    layers: tuple[Layer[Leaf], ...]
    rest: Transformer[Leaf]
    experts: Experts[Leaf] | None = None


def layers_with_experts(policy: UnstackedPolicy[Array]) -> tuple[Layer[Array], ...]:
    """Layers with the matrices of their experts. Called in the loop of decode steps, or the loop
    would carry copies of the matrices."""
    if policy.experts is None:
        return policy.layers
    num_routed = policy.experts.down.shape[0]
    dense, routed = policy.layers[:-num_routed], policy.layers[-num_routed:]
    layers = [*dense]
    for index, layer in enumerate(routed):
        assert layer.experts is not None
        gate_up, down = (
            jax.lax.index_in_dim(matrices, index, keepdims=False)
            for matrices in (policy.experts.gate_up, policy.experts.down)
        )
        experts = replace(layer.experts, gate_up=gate_up, down=down)
        layers.append(replace(layer, experts=experts))
    return tuple(layers)


def unstack(
    weights: Transformer[Leaf], model: Model, layer_of: Callable[[Leaf, int | slice], Leaf]
) -> UnstackedPolicy[Leaf]:
    """Unstacks weights into the layers of decode steps.

    Args:
      layer_of: (leaf of a stack, index or slice of indices) -> leaf of the layer or the layers.
    """
    rest, experts, matrices = without_layers(weights), weights.layers.experts, None
    if experts is not None and keeps_expert_stack(model):
        absent: Any = None
        nothing: Any = jax.tree.map(lambda _: absent, experts)
        matrices = replace(nothing, gate_up=experts.gate_up, down=experts.down)
        experts = replace(experts, gate_up=absent, down=absent)
        weights = replace(weights, layers=replace(weights.layers, experts=experts))
    return UnstackedPolicy(map_layer_groups(weights, step_config(model), layer_of), rest, matrices)


def unstack_policy(decoder: Decoder, weights: Transformer[Array]) -> UnstackedPolicy[Array]:
    """Unstacks the weights, once for all steps: no step slices a layer out of its stack.

    Stacks that are scanned or read in place, and the weights outside layers, are arrays of
    `weights`, not copies, unless they are sharded otherwise than for decoding (`Execution.fsdp`).
    """
    policy = unstack(weights, decoder.model, lambda leaf, index: _COPY)
    leaves, structure = jax.tree.flatten(policy)
    targets = jax.tree.leaves(named_shardings(policy_specs(decoder), decoder.mesh))
    is_shared = tuple(map(_has_sharding, leaves, targets))
    if all(is_shared):
        return policy
    copied = iter(_compiled_unstack(decoder, is_shared)(weights))
    pairs = zip(leaves, is_shared, strict=True)
    return structure.unflatten([leaf if shared else next(copied) for leaf, shared in pairs])


def abstract_policy(
    decoder: Decoder, weights: Transformer[jax.ShapeDtypeStruct]
) -> UnstackedPolicy[jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the result of `unstack_policy`."""
    shared = unstack(weights, decoder.model, lambda leaf, index: _COPY)
    copied = jax.eval_shape(lambda tree: unstack(tree, decoder.model, operator.getitem), weights)
    return jax.tree.map(
        lambda leaf, like, sharding: (
            leaf if _has_sharding(leaf, sharding) else abstract_array(like, sharding)
        ),
        *(shared, copied, named_shardings(policy_specs(decoder), decoder.mesh)),
    )


_COPY: Any = object()
"""Leaf of a layer that is sliced out of its stack."""


def _has_sharding(leaf: Any, sharding: NamedSharding) -> bool:
    if leaf is _COPY or isinstance(leaf, Tracer):
        return False
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@remembered
def _compiled_unstack(decoder: Decoder, is_shared: tuple[bool, ...]) -> Any:
    """Compiled function of the weights that returns the leaves which are not shared."""

    def select(tree: Any) -> list[Any]:
        leaves = zip(jax.tree.leaves(tree), is_shared, strict=True)
        return [leaf for leaf, shared in leaves if not shared]

    def unstack_unshared(weights: Transformer[Array]) -> list[Array]:
        return select(unstack(weights, decoder.model, operator.getitem))

    shardings = named_shardings(policy_specs(decoder), decoder.mesh)
    return jit_onto(unstack_unshared, select(shardings))


def policy_specs(decoder: Decoder) -> UnstackedPolicy[PartitionSpec]:
    """Partition specs of the unstacked weights."""

    # A single layer has no leading layer axis; a stack that is scanned keeps it.
    def layer_spec(spec: PartitionSpec, index: int | slice) -> PartitionSpec:
        return spec if isinstance(index, slice) else PartitionSpec(*spec[1:])

    return unstack(specs(decoder.model), decoder.model, layer_spec)


class _Loop(NamedTuple):
    """Carry of the decoding loop; `steps` counts tokens of the longest-lived row."""

    steps: Array
    num_live: Array
    row_steps: Array
    rows: TokenRows[Array]
    live: Array
    cache: Cache[Array]


@partial(MeshJit, overlap=False, one_graph=True, static_argnums=(0, 1, 2), donate_argnums=4)
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
    return jax.shard_map(
        partial(_advance_local, decoder, sampling, cache_length),
        mesh=mesh.mesh,
        in_specs=(
            policy_specs(decoder),
            pools,
            sampler_state_specs(mesh, sampler_state),
            StepLimits(replicated, replicated, over_slots(mesh)),
        ),
        out_specs=(pools, replicated),
    )(policy, pool, sampler_state, limits)


def _advance_local(
    decoder: Decoder,
    sampling: Sampling,
    cache_length: int,
    policy: UnstackedPolicy[Array],
    pool: SlotPool[Array],
    sampler_state: SamplerState,
    limits: StepLimits[Array],
) -> tuple[SlotPool[Array], Advanced]:
    all_slots = pool
    if limits.slots is not None:
        # Gathered once for all steps, whose cost is proportional to the number of rows.
        pool, sampler_state = _gather_slots(limits.slots, pool, sampler_state)
    mesh = decoder.mesh
    policy = vary(policy, mesh.axes)

    def count(live):
        # The same on every device: all leave the loop in the same step, as its body has
        # collectives.
        return all_sum(jnp.sum(live.astype(jnp.int32)), mesh.except_sequence)

    def step(loop: _Loop) -> _Loop:
        rows = loop.rows
        # The last token of a live row has not been run: this step writes its keys and values.
        last = jnp.maximum(rows.lengths - 1, 0)
        tokens = jnp.take_along_axis(rows.tokens, last[:, None], axis=1)[:, 0]
        inputs = StepTokens(tokens, last, loop.live)
        logits, cache, choices = decode_step(
            layers_with_experts(policy),
            policy.rest,
            loop.cache,
            inputs,
            decoder.model,
            decoder.records_choices,
            rope,
        )
        if rows.choices is not None:
            rows = replace(rows, choices=write_token(rows.choices, loop.live, last, choices))
        rows, live = append_next_tokens(
            decoder, sampling, logits, pool, rows, loop.live, sampler_state
        )
        # The number of rows live before the step: the token that ends a row is part of it.
        row_steps = loop.row_steps + loop.num_live
        return _Loop(loop.steps + 1, count(live), row_steps, rows, live, cache)

    # A shorter cache is copied once, so that no step reads unused positions; the whole is not.
    read = over_columns(partial(_slice_cache, cache_length), pool.cache)
    # RoPE tables are computed here once; otherwise each layer would compute them in each step.
    rope = vary(rotary_tables(cache_length, decoder.config), mesh.axes)
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
    if limits.slots is not None:
        pool = _scatter_slots(limits.slots, all_slots, pool)
    return pool, Advanced(loop.steps, loop.row_steps)


def _gather_slots(
    slots: Array, pool: SlotPool[Array], sampler_state: SamplerState
) -> tuple[SlotPool[Array], SamplerState]:
    """Gathers the given slots of a rank, with their sampling parameters."""

    def take(x: Array, axis: int = 0) -> Array:
        return jnp.take(x, slots, axis, mode="clip", unique_indices=True)

    # Rows are on another axis in the cache than in the other arrays.
    cache = jax.tree.map(lambda x: take(x, x.ndim + ROW), pool.cache)
    gathered = jax.tree.map(take, without_cache(pool))
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
    rest = jax.tree.map(scatter, without_cache(pool), without_cache(gathered))
    return replace(rest, cache=cache)


def _slice_cache(cache_length: int, buffer: Array, axis: int | None) -> Array:
    if axis is None:
        return buffer
    return jax.lax.slice_in_dim(buffer, 0, cache_length, axis=axis)


def _update_cache(buffer: Array, new: Array, axis: int | None) -> Array:
    if axis is None:
        return new
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, 0, axis=axis)


class MeshBackend:
    """One mesh, over the devices of training in the same order or over others.

    Args:
      decoder: compile-time settings; adapters of its network are merged for decoding.
      training: the mesh that weights come from.

    Attributes:
      decoder: compile-time settings; its mesh is the one of the rows.
      slot_sharding: sharding of arrays with a row per slot.
      computes_fewer: true if a step may compute fewer slots than all.
      keeps_cache: true if rows may continue with their KV cache when the weights change.
      max_prefill_tokens: approximate number of prompt tokens of a rank in one prefill; None if the
        engine's own bounds suffice.
    """

    max_prefill_tokens: int | None = None
    computes_fewer = keeps_cache = True

    def __init__(self, decoder: Decoder, training: FoldedMesh):
        self._trained = Model(decoder.config, training)
        self.decoder = decoder._replace(config=decoder.config.without_adapters())
        self._policy: tuple[Transformer[Array], UnstackedPolicy[Array]] | None = None
        self.slot_sharding = NamedSharding(decoder.mesh.mesh, over_slots(decoder.mesh))

    def check(self, slots: int) -> None:
        """Checks that this many slots can decode; raises ValueError otherwise."""
        check_slots(self.decoder.mesh, slots)

    def slot_choice(self, slots: int) -> ChooseSlot | None:
        """Choice of a request's slot on its rank; None takes the one free for longest."""
        return None

    def load(self, weights: Transformer[Array]) -> None:
        """Puts the policy on the devices that decode; `weights` are on the mesh of training."""
        self.release()  # old and new need not fit in memory together
        policy = rollout_policy(weights, self._trained, self.decoder.mesh)
        self._policy = policy, unstack_policy(self.decoder, policy)

    def release(self) -> None:
        """Frees the memory of the policy."""
        self._policy = None

    def abstract_policy(self) -> tuple[Transformer[Any], UnstackedPolicy[Any]]:
        """Shapes, dtypes and shardings of the policy that `load` puts on the devices: for prefill,
        and for steps."""
        config, mesh = self.decoder.config, self.decoder.mesh
        if mesh != self._trained.mesh:
            config = without_fsdp(config)
        model = Model(config, mesh)
        weights = jax.eval_shape(lambda tree: in_chunks(tree, mesh), cast_shapes(config))
        weights = jax.tree.map(abstract_array, weights, shardings(model))
        return weights, abstract_policy(self.decoder, weights)

    def restart(self) -> bool:
        """Undoes what earlier requests changed, so that samples depend on the next ones only;
        called if no request is in flight. True if the KV cache in the slots would be computed
        otherwise now."""
        return False

    def admit(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        """Admits rows to the pool and donates it (`prefill.admit`).

        Args:
          sampling, state: static parameters of the samplers, and their arrays.

        Returns:
          The pool, and true if the prefill was repeated with dropless expert buffers.
        """
        weights, arrays = self._loaded()[0], (tokens, lengths, admission, state)
        dropless = self.decoder.for_any_routing()
        return run_with_fallback(
            lambda: admit(self.decoder, sampling, weights, pool, *arrays),
            lambda pool: admit(dropless, sampling, weights, pool, *arrays)[0],
        )

    def admit_packed(
        self,
        pool: SlotPool[Array],
        rows: tuple[Packing[Array], CacheCopies[Array]],
        tokens: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        """`admit` of prompts that share rows.

        Args:
          rows: the packed rows, and the copies of their keys and values to the slots.
          tokens: ``[slot, position]`` ids.
        """
        decoder, (weights, unstacked), (packing, cache_copies) = self.decoder, self._loaded(), rows

        def run(decoder: Decoder) -> tuple[Prefilled, Array | None]:
            prefill = run_packed(decoder, weights, packing)
            return prefill, prefill.overflow

        prefill, repeated = run_with_fallback(
            lambda: run(decoder), lambda _: run(decoder.for_any_routing())[0]
        )
        # The cache is handled separately: `admit_prefilled` would be compiled for each of its
        # lengths.
        cache = copy_to_cache(decoder, pool.cache, prefill.cache, cache_copies)
        pool = without_cache(pool)
        prefill = prefill._replace(cache=pool.cache, overflow=None)
        pool = admit_prefilled(
            decoder, sampling, unstacked.rest, pool, prefill, tokens, admission, state
        )
        return replace(pool, cache=cache), repeated

    def score(
        self, packing: Packing[np.ndarray], needs_top_tokens: bool
    ) -> PackedScores[np.ndarray]:
        """Log-probabilities of the tokens of packed rows, on the host."""
        decoder, weights = self.decoder, self._loaded()[0]
        top = decoder.top_logprobs if needs_top_tokens else 0
        rows = to_devices(packing, self.slot_sharding)
        scores, _ = run_with_fallback(
            lambda: score_packed(decoder, top, weights, rows),
            lambda _: score_packed(decoder.for_any_routing(), top, weights, rows)[0],
        )
        return to_host(scores)

    def decode(
        self,
        pool: SlotPool[Array],
        cache_length: int,
        limits: StepLimits[Any],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], Advanced]:
        """Decodes all live rows until the scheduler runs again; donates the pool.

        Args:
          cache_length: positions of the cache that attention reads; all rows must fit into them.
          limits: on the host.
        """
        numbers = np.int32(limits.max_steps), np.int32(limits.min_live)
        max_steps, min_live = to_devices(numbers, replicated(self.decoder.mesh))
        slots = to_devices(limits.slots, self.slot_sharding)
        policy, limits = self._loaded()[1], StepLimits(max_steps, min_live, slots)
        return advance(self.decoder, sampling, cache_length, policy, pool, state, limits)

    def output_buffer(self, rows: TokenRows[Array], size: int) -> TokenRows[Array]:
        """Empty output buffer for `size` rows such as these."""
        return make_output_buffer(rows, size, self.slot_sharding)

    def write_to_buffer(
        self, buffer: TokenRows[Array], rows: TokenRows[Array], destinations: np.ndarray
    ) -> TokenRows[Array]:
        """Copies the row of each slot to its destination in the output buffer, which is donated;
        destinations are unique, and past the end drops a row."""
        sharding = self.slot_sharding
        return write_to_buffer(buffer, rows, to_devices(destinations, sharding), sharding)

    def to_host(self, tree: Any) -> Any:
        """Copies arrays of the rows' mesh to the host, in all processes."""
        return to_host(tree)

    @property
    def step_policy(self) -> UnstackedPolicy[Array]:
        """The policy as steps read it."""
        return self._loaded()[1]

    def _loaded(self) -> tuple[Transformer[Array], UnstackedPolicy[Array]]:
        """The policy, as it is stored for prefill and for steps."""
        assert self._policy is not None, "no weights were loaded"
        return self._policy
