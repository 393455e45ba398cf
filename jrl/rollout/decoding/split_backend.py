"""Backend with attention and experts on separate device groups (`moe.disaggregated`).

Slots, requests and sampling are the same as on one mesh, and give the same tokens; rows are stored
on the attention devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import any_of, is_multiprocess, to_devices, to_every_host
from jrl.recipes.base.batch import replicated
from jrl.rollout.decoding.expert_balancer import ExpertBalancer
from jrl.rollout.decoding.mesh_backend import Advanced, StepLimits
from jrl.rollout.decoding.prefill import AdmissionArrays, admit_prefilled
from jrl.rollout.decoding.scheduling.scheduler import ChooseSlot
from jrl.rollout.decoding.scheduling.sizes import bucket
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
from jrl.rollout.resharding import split_policy
from jrl.rollout.sampling import Sampling
from moe.cache import StepTokens
from moe.config import Model
from moe.disaggregated.placement import Placement
from moe.disaggregated.runner import DecodeLoop, Runner
from moe.disaggregated.schedule import AttentionTime, lightest_batch
from moe.disaggregated.split import SplitMesh, has_local_devices
from moe.disaggregated.weights import SplitWeights, move_experts
from moe.router.routing import choices_dtype
from moe.weights import Transformer
from sharding.collectives import all_sum, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import DeviceJit, MeshJit

STEPS_BEFORE_COUNT = 2
"""Decoding steps that the host enqueues before it checks that rows are left to decode."""

MAX_EXCHANGED_TOKENS = 2**15
"""Approximate number of tokens that a device has messages for in one prefill, which bounds its
memory."""


def max_prefill_tokens(mesh: SplitMesh) -> int:
    """Approximate number of prompt tokens of a ``dp`` rank in one prefill.

    Each attention device has a message with capacity for all its tokens to every expert device, and
    one back: the memory of either is proportional to the tokens of a device times the number of
    devices on the other side.
    """
    peers = max(side.layout.num_devices for side in (mesh.attention, mesh.experts))
    return max(1, MAX_EXCHANGED_TOKENS * mesh.attention.layout.tp // peers)


@dataclass(frozen=True)
class DeviceSplit:
    """Device groups of attention and experts, and the settings of decoding on them.

    Attributes:
      mesh: mesh of both device groups.
      micro_batches: micro-batches of the slots in flight: while one is with the experts, attention
        works on another.
      expert_slots: experts that an expert device can hold, with replicas of hot experts; None is
        its share.
      replan: tokens of a row after which experts are re-balanced by their loads; None keeps the
        placement.
      m2n: transport between the groups, as for `moe.disaggregated.runner.Runner`.
    """

    mesh: SplitMesh
    micro_batches: int = 2
    expert_slots: int | None = None
    replan: int | None = None
    m2n: str | None = None

    def check_slots(self, slots: int) -> None:
        """Raises ValueError for slots that do not divide over devices and micro-batches."""
        layout, micro_batches = self.mesh.attention.layout, self.micro_batches
        unit = layout.num_devices * micro_batches
        if slots < 1 or slots % unit:
            raise ValueError(
                f"slots={slots} does not divide over dp={layout.dp} x tp={layout.tp} devices of "
                f"attention x micro_batches={micro_batches}: choose --slots in multiples of "
                f"{unit}, or another --micro-batches."
            )


class SplitBackend:
    """Two groups of devices, one for attention and one for experts.

    Args:
      decoder: compile-time settings of an MoE model, on the mesh of attention; adapters are merged
        for decoding.
      training: the mesh that weights come from.
      split: the device groups.
      restarts: true to begin with equal loads if no row is in flight, so that samples depend on
        the requests only, bit for bit. False if requests come at any time: earlier loads are the
        best prediction then, and decay exponentially.

    Raises:
      ValueError: on sizes that do not divide.
    """

    # Micro-batches are of one size, and the KV cache depends on the placement of experts.
    computes_fewer = keeps_cache = False

    def __init__(
        self,
        decoder: Decoder,
        training: FoldedMesh,
        split: DeviceSplit,
        *,
        restarts: bool = True,
    ):
        # Each layer's KV cache in a buffer of its own, which its compiled function donates.
        execution = replace(decoder.config.execution, scan_layers=False)
        self._policy_config = replace(decoder.config, execution=execution)
        plain = self._policy_config.without_adapters()
        self.decoder = decoder._replace(config=plain)
        mesh, self._split = split.mesh, split
        self._training, self._mesh, self._micro_batches = training, mesh, split.micro_batches
        self._restarts, self.max_prefill_tokens = restarts, max_prefill_tokens(mesh)
        self.expert_balancer = ExpertBalancer(
            plain, mesh, split.expert_slots, split.replan, decays=not restarts
        )
        self._runner = Runner(
            plain,
            mesh,
            placement=self.expert_balancer.placements[0],
            m2n=split.m2n,
            # Loads are counted from expert ids, recorded for a replay or not.
            records_choices=decoder.records_choices or split.replan is not None,
        )
        if is_multiprocess():
            any_of(False)  # a barrier: all processes have compiled what came before
            self._runner.connect()
        self._weights: SplitWeights[Array] | None = None
        self.loads = self._no_loads()
        self._has_attention = has_local_devices(mesh.attention)
        self.slot_sharding = NamedSharding(mesh.attention.mesh, over_slots(mesh.attention))

    def check(self, slots: int) -> None:
        self._split.check_slots(slots)
        check_slots(self.decoder.mesh, slots)

    def slot_choice(self, slots: int) -> ChooseSlot | None:
        mesh = self.decoder.mesh
        size = slots // mesh.size(mesh.dp) // self._micro_batches
        predicted = AttentionTime.from_config(self.decoder.config)
        return LightestMicroBatch(size, self._micro_batches, predicted)

    def load(self, weights: Transformer[Array]) -> None:
        self.release()  # old and new need not fit in memory together
        placements = self.expert_balancer.placements
        model = Model(self._policy_config, self._training)
        self._weights = split_policy(weights, model, self._mesh, placements)

    def release(self) -> None:
        self._weights = None

    def restart(self) -> bool:
        if not self._restarts:
            return False
        moved, before = self.expert_balancer.has_moved, self.expert_balancer.placements
        self.expert_balancer.restart()
        self.loads = self._no_loads()
        if moved:
            self._move_experts(before)
        # The KV cache was computed with another placement, and rounded otherwise.
        return moved

    def _move_experts(self, before: Sequence[Placement]) -> None:
        """Moves the stored weights from the placement `before` to the present one."""
        if self._weights is not None:
            after = self.expert_balancer.placements
            self._weights = move_experts(self._weights, self._mesh, before, after)

    def _no_loads(self) -> Array:
        config = self.decoder.config
        return self._replicate(np.zeros((config.num_expert_layers, config.num_experts), np.int32))

    def _rebalance_experts(self) -> None:
        """Re-balances the experts by the loads since the last call."""
        loads, before = self.to_host(self.loads), self.expert_balancer.placements
        self.loads = self._no_loads()
        if self.expert_balancer.rebalance(loads):
            self._move_experts(before)

    def admit(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        weights, prefilled = self._loaded(), None
        if tokens.shape[0]:
            prefilled = self._runner.prefill(weights, tokens, lengths)
        if not self._has_attention:
            return pool, False
        assert weights.rest is not None
        if prefilled is not None and prefilled.choices is not None:
            dtype = choices_dtype(self.decoder.config.num_experts)
            choices = prefilled.choices.astype(dtype) if self.decoder.records_choices else None
            prefilled = prefilled._replace(choices=choices)
        pool = admit_prefilled(
            self.decoder, sampling, weights.rest, pool, prefilled, tokens, admission, state
        )
        return pool, False

    def decode(
        self,
        pool: SlotPool[Array],
        cache_length: int,
        limits: StepLimits[Any],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], Advanced]:
        num_micro_batches, min_live = self._micro_batches, limits.min_live
        max_tokens = self.expert_balancer.limit_tokens(limits.max_steps)
        indices = [self._replicate(np.int32(i)) for i in range(num_micro_batches)]
        cache = None
        if self._has_attention:
            # The runner donates the cache layer by layer, `_sample_micro_batch` the rest.
            cache, pool = pool.cache, without_cache(pool)
        # For each token and micro-batch, the number of rows that got it and of those still live.
        counts: list[list[Any]] = [[] for _ in range(num_micro_batches)]
        totals = list[np.ndarray]()

        def begin(i: int) -> StepTokens:
            return _read_step_inputs(self.decoder, num_micro_batches, pool, indices[i])

        def end(i: int, logits: Array, choices: Array | None) -> tuple[Array, Array]:
            nonlocal pool
            if self.expert_balancer.every is not None:
                self.loads = _add_expert_loads(
                    self.decoder, num_micro_batches, self.loads, pool.live, choices, indices[i]
                )
            if not self.decoder.records_choices:
                choices = None
            pool, num_sampled, num_live = _sample_micro_batch(
                self.decoder, sampling, num_micro_batches, pool, logits, choices, state, indices[i]
            )
            counts[i].append((num_sampled, num_live))
            return num_sampled, num_live

        def count(token: int) -> int:
            """Number of live rows after `token`, the first token that was not counted yet."""
            pairs = jax.device_get([of_batch[token] for of_batch in counts])
            totals.append(np.sum([np.reshape(pair, -1) for pair in pairs], axis=0))
            return int(totals[-1][1])

        # Enqueued steps run on; counts are read `STEPS_BEFORE_COUNT` tokens later.
        def continues(token: int) -> bool:
            if token >= STEPS_BEFORE_COUNT and count(token - STEPS_BEFORE_COUNT) <= min_live:
                return False
            return token < max_tokens

        cache = self._runner.decode(
            self._loaded(),
            cache,
            pool.live.shape[0],
            num_micro_batches,
            # A process without attention receives the counts, and decides as the others do.
            DecodeLoop(begin, end, continues, lambda i, heard: counts[i].append(heard)),
            cache_length,
        )
        # Tokens that were enqueued after the last count.
        for token in range(len(totals), len(counts[0])):
            count(token)
        grew = np.array(totals)[:, 0]
        # An enqueued token that no row got is not a step.
        steps = int((grew > 0).sum())
        if self.expert_balancer.is_due(steps):
            self._rebalance_experts()
        advanced = Advanced(jnp.asarray(steps), jnp.asarray(grew.sum()))
        return pool if cache is None else replace(pool, cache=cache), advanced

    def output_buffer(self, rows: TokenRows[Array], size: int) -> TokenRows[Array]:
        # In a run of multiple processes it is on all of them.
        sharding = replicated(self._training) if is_multiprocess() else self.slot_sharding
        return make_output_buffer(rows, size, sharding)

    def write_to_buffer(
        self, buffer: TokenRows[Array], rows: TokenRows[Array], destinations: np.ndarray
    ) -> TokenRows[Array]:
        if not is_multiprocess():
            sharding = self.slot_sharding
            return write_to_buffer(buffer, rows, to_devices(destinations, sharding), sharding)
        # The output buffer is on all processes: rows move through their hosts, finished ones only.
        (slots,) = np.nonzero(destinations < buffer.lengths.shape[0])
        num_rows = bucket(len(slots), len(destinations), least=1)
        sources = np.zeros(num_rows, np.int32)
        targets = buffer.lengths.shape[0] + np.arange(num_rows, dtype=np.int32)
        sources[: len(slots)], targets[: len(slots)] = slots, destinations[slots]
        finished = _gather_rows(rows, self._replicate(sources), self.decoder.mesh)
        sharding = replicated(self._training)
        moved, targets = to_devices((self.to_host(finished), targets), sharding)
        return write_to_buffer(buffer, moved, targets, sharding)

    def to_host(self, tree: Any) -> Any:
        return to_every_host(tree, self.decoder.mesh)

    def _replicate(self, tree: Any) -> Any:
        return to_devices(tree, replicated(self.decoder.mesh))

    def _loaded(self) -> SplitWeights[Array]:
        assert self._weights is not None, "no weights were loaded"
        return self._weights


class LightestMicroBatch(NamedTuple):
    """Choice of slots that balances the predicted attention time of micro-batches, which are
    consecutive slots of a rank: a request gets a slot in the one with the least.

    Attributes:
      size: slots of a micro-batch.
      micro_batches: number of micro-batches of a rank.
      predicted: model of the attention time of rows.
    """

    size: int
    micro_batches: int
    predicted: AttentionTime

    def __call__(self, free: Sequence[int], lengths: Mapping[int, int]) -> int:
        first = free[0] // (self.size * self.micro_batches) * self.micro_batches
        batches = range(first, first + self.micro_batches)
        free_slots = [[slot for slot in free if slot // self.size == i] for i in batches]
        rows = [[n for slot, n in lengths.items() if slot // self.size == i] for i in batches]
        # By the tokens in the cache too: longer rows take attention longer.
        times = [self.predicted.batch_time(row_lengths) for row_lengths in rows]
        return free_slots[lightest_batch(times, list(map(len, free_slots)))][0]


@partial(DeviceJit, static_argnums=2)
def _gather_rows(rows: TokenRows[Array], slots: Array, mesh: FoldedMesh) -> TokenRows[Array]:
    """Rows of the given slots, replicated on every device."""
    gathered = jax.tree.map(lambda column: jnp.take(column, slots, axis=0), rows)
    return lax.with_sharding_constraint(gathered, replicated(mesh))


@partial(jax.jit, static_argnums=(0, 1))
def _read_step_inputs(
    decoder: Decoder, num_micro_batches: int, pool: SlotPool[Array], index: Array
) -> StepTokens:
    """Last token of each row of the micro-batch `index`, still to be run, its position,
    and the mask of live rows; `pool` is without its cache."""
    mesh = decoder.mesh

    def local(pool: SlotPool[Array], index: Array) -> StepTokens:
        tokens, lengths, live = (
            _slice_micro_batch(x, num_micro_batches, index)
            for x in (pool.rows.tokens, pool.rows.lengths, pool.live)
        )
        last = jnp.maximum(lengths - 1, 0)
        return StepTokens(jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0], last, live)

    rows: Any = over_slots(mesh)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(pool_specs(mesh, pool), PartitionSpec()),
        out_specs=StepTokens(rows, rows, rows),
    )(pool, index)


@partial(MeshJit, overlap=False, static_argnums=(0, 1), donate_argnums=2)
def _add_expert_loads(
    decoder: Decoder,
    num_micro_batches: int,
    loads: Array,
    live: Array,
    choices: Array,
    index: Array,
) -> Array:
    """Adds the tokens of the micro-batch `index` to `loads`, ``[layer, expert]`` and donated.

    `live` is the mask of all rows; `choices` are the expert ids of the micro-batch.
    """
    mesh = decoder.mesh

    def local(loads: Array, live: Array, choices: Array, index: Array) -> Array:
        layers = jnp.arange(loads.shape[0])[None, :, None]
        # Rows that are not live are computed too, but are not counted.
        counts = jnp.broadcast_to(
            _slice_micro_batch(live, num_micro_batches, index)[:, None, None], choices.shape
        )
        local_loads = jnp.zeros_like(loads).at[layers, choices].add(counts.astype(loads.dtype))
        return loads + all_sum(vary(local_loads, mesh.except_sequence), mesh.except_sequence)

    replicated, rows = PartitionSpec(), over_slots(mesh)
    return jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(replicated, rows, rows, replicated), out_specs=replicated
    )(loads, live, choices, index)


@partial(MeshJit, overlap=False, static_argnums=(0, 1, 2), donate_argnums=3)
def _sample_micro_batch(
    decoder: Decoder,
    sampling: Sampling,
    num_micro_batches: int,
    pool: SlotPool[Array],
    logits: Array,
    choices: Array | None,
    sampler_state: SamplerState,
    index: Array,
) -> tuple[SlotPool[Array], Array, Array]:
    """Samples the next token of the live rows of the micro-batch `index`, as
    `jrl.rollout.decoding.mesh_backend.advance` does for all rows.

    `pool` is without its cache, and donated; `logits` are sharded over all devices; `choices` are
    the expert ids of the tokens that were run. Returns the pool, the number of rows that got a
    token, and the number of those still live.
    """
    mesh = decoder.mesh

    def local(pool, logits, choices, sampler_state, index):
        def slice_rows(x: Array) -> Array:
            return _slice_micro_batch(x, num_micro_batches, index)

        micro_batch = jax.tree.map(slice_rows, pool)
        rows, live = micro_batch.rows, micro_batch.live
        if rows.choices is not None:
            last = jnp.maximum(rows.lengths - 1, 0)
            rows = replace(rows, choices=write_token(rows.choices, live, last, choices))
        # Per-request sampling parameters, if there are any, of this micro-batch.
        state = sampler_state._replace(rows=jax.tree.map(slice_rows, sampler_state.rows))
        rows, continues = append_next_tokens(
            decoder, sampling, logits, micro_batch, rows, live, state
        )
        # Micro-batch i is the i-th part of each device's slots.
        first = index * live.shape[0]

        def write_back(full: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(full, new, first, axis=0)

        updated = replace(
            pool,
            rows=jax.tree.map(write_back, pool.rows, rows),
            live=write_back(pool.live, continues),
        )

        def count(mask: Array) -> Array:
            return all_sum(jnp.sum(mask.astype(jnp.int32)), mesh.except_sequence)

        return vary(updated, mesh.except_sequence), count(live), count(continues)

    replicated, over_devices, rows = PartitionSpec(), PartitionSpec(mesh.axes), over_slots(mesh)
    pools, states = pool_specs(mesh, pool), sampler_state_specs(mesh, sampler_state)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(pools, over_devices, rows, states, replicated),
        out_specs=(pools, replicated, replicated),
    )(pool, logits, choices, sampler_state, index)


def _slice_micro_batch(x: Array, num_micro_batches: int, index: Array) -> Array:
    """Slice of the rows of a micro-batch."""
    size = x.shape[0] // num_micro_batches
    return lax.dynamic_slice_in_dim(x, index * size, size)
