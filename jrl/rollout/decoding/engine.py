"""Rollout engine with continuous batching: when a row ends, the next takes its slot."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import to_devices, to_host
from jrl.processes.progress import heartbeat
from jrl.recipes.base.batch import replicated
from jrl.rollout.decoding.extension import admit_extensions
from jrl.rollout.decoding.mesh_backend import MeshBackend, StepLimits
from jrl.rollout.decoding.packed_prompts import (
    PromptScores,
    make_packing,
    plan_cache_copies,
    plan_rows,
    score_prompts,
)
from jrl.rollout.decoding.prefill import AdmissionArrays, make_admission
from jrl.rollout.decoding.protocol import Usage
from jrl.rollout.decoding.requests import (
    Finish,
    Request,
    StreamChunk,
    Trajectory,
    make_chunk,
    read_sampled,
)
from jrl.rollout.decoding.scheduling.cache_size import CacheSize, length_of
from jrl.rollout.decoding.scheduling.prefix_cache import Extension
from jrl.rollout.decoding.scheduling.scheduler import (
    REFILL_DIVISOR,
    AdmissionPlan,
    SlotScheduler,
    plan_unpacked_rows,
)
from jrl.rollout.decoding.scheduling.sizes import (
    ROLLOUTS,
    EnginePolicy,
    bucket,
    row_sizes,
    row_widths,
    unpacked_row_sizes,
)
from jrl.rollout.decoding.slots import (
    OutputBuffer,
    RecentTokens,
    SamplerState,
    SlotPool,
    empty_pool,
    halt,
    recent_tokens,
    row_of,
    with_cache_length,
)
from jrl.rollout.decoding.split_backend import SplitBackend
from jrl.rollout.sampling import Sampling, compiled_sampling, stack_sampling
from moe.cache import cache_columns, reads_live_columns
from moe.implementations import check_decode_kernel
from moe.weights import Transformer

Backend = MeshBackend | SplitBackend
"""The devices that decode for an engine: one mesh, or separate device groups of attention and
experts."""

WINDOW = 64
"""Tokens of a row between two scheduler steps; finished rows are verified meanwhile."""


class Engine:
    """Pool of decoding slots with continuous batching: when a row ends, the next takes its slot.

    A row's tokens depend on the weights, the seed, its prompt and sample ids, and the tokens so
    far: neither on its slot nor on other rows, nor on the devices of the backend. Rows whose
    requests have sampling parameters of their own depend on the seed of those, not on the prompt
    id.

    A rollout submits requests and polls until they have ended:

        engine.load(weights, version=0)
        engine.submit([Request(0, sample, ids, 64) for sample in range(8)], Sampling())
        while trajectories := engine.poll():
            print([trajectory.tokens for trajectory in trajectories])

    A server submits requests at any time, and streams the tokens of all rows, a few at a time.

    Args:
      backend: the devices that decode.
      slots: rows that are decoded at a time; a multiple of the ranks that share them.
      max_length: tokens of the longest row, prompt and response.
      key: RNG key from which the keys of all tokens are derived.
      policy: how much it runs at a time. In `SERVING` the rows that are computed together depend on
        when requests come, so results are not reproducible bit for bit.

    Attributes:
      step_sizes: slots of each rank that a step may compute, ascending: each number is a compiled
        function, in which sums may round differently.
      cache_sizes: lengths that the cache may have, ascending; functions are compiled for each.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        slots: int,
        max_length: int,
        key: Array,
        policy: EnginePolicy = ROLLOUTS,
    ):
        backend.check(slots)
        self.backend, self.decoder, self.slots = backend, backend.decoder, slots
        config, mesh = self.decoder.config, self.decoder.mesh
        check_decode_kernel(config)
        self.mesh, self.ranks, self._policy = mesh, mesh.size(mesh.dp), policy
        # Tokens of a forward pass are sharded over ``tp``.
        self._unit, per_rank = mesh.size(mesh.tp), slots // self.ranks
        self.max_length = cache_columns(max_length, self.decoder.model)
        self._row_widths: Sequence[int] = ()
        # Packed rows support neither the states of Gated DeltaNet nor recorded expert ids.
        can_pack = isinstance(backend, MeshBackend) and config.delta is None
        can_pack = can_pack and not self.decoder.records_choices
        if policy.packs_prompts and can_pack:
            self._row_widths = row_widths(self.max_length, self._unit)
        limits = policy.prefill_tokens, backend.max_prefill_tokens
        self._prefill_tokens = min(limit for limit in limits if limit is not None)
        self.cache_sizes, self.step_sizes = policy.cache_sizes(self.max_length), [per_rank]
        if backend.computes_fewer:
            self.step_sizes = policy.step_sizes(per_rank, self.max_length, self._unit)
        prompts = policy.prefill_prompts
        self.scheduler = SlotScheduler(
            slots,
            self.ranks,
            self._prefill_tokens,
            row_widths=self._row_widths,
            # Gated DeltaNet has a state after a row's last token only.
            can_copy=config.delta is None,
            most_prompts=None if prompts is None else -(-prompts // self.ranks),
            choose_slot=backend.slot_choice(slots),
            min_prefix=policy.min_prefix if can_pack else None,
        )
        self.usage = Usage()
        self._key = self._replicate(jax.random.key_data(key))
        self._version, self._entropy = 0, None
        self._sampling: Sampling | None = Sampling()
        self._sampler_state: SamplerState | None = None
        self._pool: SlotPool[Array] | None = None
        self._limits = np.zeros(slots, np.int32)
        self._output_buffer: OutputBuffer | None = None
        self.cache_size = CacheSize(
            self.cache_sizes,
            resizes=policy.resizes_cache,
            reads_live_columns=reads_live_columns(self.decoder.model),
        )

    @property
    def prefill_sizes(self) -> list[tuple[int, int]]:
        """Widths and numbers of rows in a prefill of a rank, each pair of which is a compiled
        function, ascending."""
        per_rank, most_tokens = self.scheduler.per_rank, self._prefill_tokens
        if self._row_widths:
            return row_sizes(self._row_widths, per_rank, most_tokens)
        return unpacked_row_sizes(self.max_length, self._unit, per_rank, most_tokens)

    @property
    def is_plain(self) -> bool:
        """True if one mesh decodes, each prompt has a row and the cache has a fixed length."""
        is_fixed = not (self._row_widths or self._policy.resizes_cache)
        return is_fixed and isinstance(self.backend, MeshBackend)

    @property
    def num_idle(self) -> int:
        return max(0, self.scheduler.num_free - len(self.scheduler.waiting))

    @property
    def num_live(self) -> int:
        """Number of occupied slots."""
        return len(self.scheduler.running)

    @property
    def busy(self) -> bool:
        """True if any request is waiting or in flight."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        self.scheduler.clear_prefix_cache()
        # Immediately: training donates its buffers while this engine samples.
        self.backend.load(weights)
        # Four numbers through the host, from the training mesh to the rollout mesh.
        self._version, self._entropy = version, to_host(entropy)
        self._sampler_state = None

    def release(self) -> None:
        self.scheduler.reset()
        self.backend.release()
        self._pool = self._output_buffer = None

    def submit(self, requests: Sequence[Request], sampling: Sampling | None = None) -> None:
        """Submits requests for responses. Those with the same prompt id are samples of one prompt,
        which is run once.

        Args:
          sampling: sampling parameters; equal for all requests in flight. None takes the parameters
            of each request.

        Raises:
          ValueError: for requests that do not fit, or have no sampling parameters.
        """
        scheduler = self.scheduler
        if self.busy and sampling != self._sampling:
            raise ValueError(
                f"requests for {sampling} cannot be served while others for {self._sampling} are "
                "in flight: poll until none is."
            )
        for request in requests:
            if sampling is None and request.sampling is None:
                raise ValueError(
                    f"request {request.prompt, request.sample} has no sampling settings: give it "
                    "a sampling=RequestSampling(...)."
                )
            if request.limit > self.max_length:
                raise ValueError(
                    f"a row of {request.limit} tokens does not fit slots of {self.max_length} "
                    "tokens: make an engine with a larger max_length."
                )
        if not self.busy and self.backend.restart():
            scheduler.reset()
        if sampling != self._sampling:
            self._sampling, self._sampler_state = sampling, None
        if requests and self._pool is None:
            self._pool = self._empty_pool()
        for request in requests:
            if request.slot is None:
                scheduler.waiting.append(request)
            else:
                scheduler.resume_in_slot(request.slot, request)
                self._limits[request.slot] = request.limit
                self._rows_changed()

    def cancel(
        self, prompts: Collection[int] = (), *, rows: Collection[tuple[int, int]] = ()
    ) -> None:
        """Aborts all requests of these prompts, and these rows, given by prompt and sample ids."""
        of_prompts, single = set(prompts), set(rows)
        slots = self.scheduler.drop(
            lambda each: each.prompt in of_prompts or (each.prompt, each.sample) in single
        )
        if slots and self._pool is not None:
            stays_live = np.ones(self.slots, bool)
            stays_live[slots] = False
            self._pool = halt(self._pool, self._shard_over_slots(stays_live))
            self._rows_changed()

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        scheduler, suspended = self.scheduler, list[Request]()
        if scheduler.running:
            rows = self.backend.to_host(self._rows_pool.rows)
            if not keep_pool:
                none_live = self._shard_over_slots(np.zeros(self.slots, bool))
                self._pool = halt(self._rows_pool, none_live)
            for slot in sorted(scheduler.running):
                request, retained_slot = scheduler.free_slot(slot), slot if keep_pool else None
                sampled = read_sampled(rows, slot, request)
                suspended.append(request._replace(sampled=sampled, slot=retained_slot))
        waiting = list(scheduler.waiting)
        scheduler.waiting.clear()
        return suspended + waiting

    def take_pool(self) -> SlotPool[Array]:
        if not self.backend.keeps_cache:
            raise NotImplementedError(
                "disaggregated decoding does not keep the KV cache when weights change"
            )
        pool, self._pool = self._pool, None
        return self._empty_pool() if pool is None else pool

    def give_pool(self, pool: SlotPool[Array]) -> None:
        self._pool = pool

    def poll(self, draining: bool = False) -> list[Trajectory]:
        scheduler, done = self.scheduler, list[Trajectory]()
        sizes = self.step_sizes if draining else self.step_sizes[-1:]
        while not done and self.busy:
            if not scheduler.running or scheduler.num_free * REFILL_DIVISOR >= self.slots:
                self._admit_waiting()
            running_slots = sorted(scheduler.running)
            is_live = self._decode(running_slots, WINDOW, scheduler.live_to_stop(sizes), sizes)
            ended = [slot for slot in running_slots if not is_live[slot]]
            # A conversation may continue: it is returned on the host, where its environment is.
            in_conversation = [s for s in ended if scheduler.running[s].conversation is not None]
            single_turn = [s for s in ended if scheduler.running[s].conversation is None]
            done = self._collect_finished(single_turn) + self._collect_on_host(in_conversation)
        return done

    def stream(self, max_tokens: int) -> list[StreamChunk]:
        """Admits waiting requests to free slots, decodes all rows further, and returns their new
        tokens: at most `max_tokens` of a row, in addition to the first of its response."""
        scheduler, width = self.scheduler, max_tokens + 1
        # `poll` waits for more free slots; clients wait for an answer.
        admits = bool(scheduler.waiting and scheduler.num_free)
        if admits and self._admit_waiting():
            max_tokens = min(max_tokens, 1)  # the first token of an extended row is not there yet
        # Including rows that finish below: their new tokens are returned too.
        if not (running_slots := sorted(scheduler.running)):
            return []
        # Rows that were just admitted have their first token already.
        before = scheduler.lengths.copy()
        is_constrained = any(r.constraint is not None for r in scheduler.running.values())
        if is_constrained:
            # Each token decides which ones are allowed next, the first of a row too.
            max_tokens = 0 if admits else 1
        is_live = self._decode(running_slots, max_tokens, 0, self.step_sizes)
        recent = self._read_recent(before, width)
        chunks = [
            make_chunk(
                scheduler.running[slot],
                recent,
                slot,
                count,
                None if is_live[slot] else self.decoder.stop_ids,
                scheduler.num_cached(slot),
            )
            for slot in running_slots
            if (count := int(scheduler.lengths[slot] - before[slot]))
        ]
        scheduler.note_tokens(chunks)
        if is_constrained:
            for chunk in chunks:
                chunk.accept()
            self._rows_changed()
        for slot in running_slots:
            if not is_live[slot]:
                scheduler.free_slot(slot)
                self._rows_changed()
        return chunks

    @property
    def records_choices(self) -> bool:
        """True if the expert ids of each token are recorded."""
        return self.decoder.records_choices

    def expert_choices(self, chunk: StreamChunk, end: int) -> np.ndarray:
        """Expert ids ``[position, layer, k]`` of the first `end` tokens of a row; its chunk is from
        the last call of `stream`."""
        choices = self._rows_pool.rows.choices
        assert choices is not None, "no expert ids are recorded"
        return self.backend.to_host(row_of(choices, np.int32(chunk.slot)))[:end]

    @property
    def scores_prompts(self) -> bool:
        """True if `score` is supported."""
        return isinstance(self.backend, MeshBackend)

    def score(
        self, prompts: Sequence[np.ndarray], needs_top_tokens: bool = False
    ) -> list[PromptScores]:
        """Log-probabilities of the tokens of prompts, in one pass that touches no slot.

        Args:
          prompts: ids of each, none longer than a row.
          needs_top_tokens: true to return the top-k tokens of each position.
        """
        if not isinstance(self.backend, MeshBackend):
            raise NotImplementedError("prompts are scored on one mesh only")
        return score_prompts(
            self.backend.score,
            prompts,
            widths=row_widths(self.max_length, self._unit),
            ranks=self.ranks,
            pad_id=self.decoder.pad_id,
            needs_top_tokens=needs_top_tokens,
        )

    def _admit_waiting(self) -> bool:
        """Admits waiting requests to free slots; true if some begin with tokens of other rows."""
        if extensions := self.scheduler.schedule_extensions():
            self._admit_extensions(extensions)
        plans = self.scheduler.schedule()
        self._rows_changed()
        for plan in plans:
            self.admit(plan)
        return bool(extensions)

    def admit(self, plan: AdmissionPlan) -> None:
        """Runs the prefill of an admission and writes the rows into their slots."""
        admit = self._admit_packed if self._row_widths and any(plan.runs) else self._admit_unpacked
        self._pool, repeated = admit(plan)
        self.usage.admitted += len(plan.assignments)
        self.usage.repeated += repeated

    def _admit_unpacked(self, plan: AdmissionPlan) -> tuple[SlotPool[Array], bool]:
        """Admits prompts that each have a row of their own, or are copies of other slots."""
        if self._policy.resizes_cache and not any(plan.runs):
            # Copies of whole rows, so that no function is compiled per length.
            needed = self.cache_size.size_of(plan.width)
            width, num_rows = max(length_of(self._rows_pool), needed), 0
        else:
            width, num_rows = self.row_shape(plan)
        tokens = np.full((self.ranks, num_rows, width), self.decoder.pad_id, np.int32)
        lengths = np.zeros((self.ranks, num_rows), np.int32)
        for rank, runs in enumerate(plan.runs):
            for index, ids in enumerate(runs):
                tokens[rank, index, : len(ids)], lengths[rank, index] = ids, len(ids)
        admission, pool = (
            self._make_admission(plan, width),
            self.cache_size.grow(self._rows_pool, width),
        )
        tokens, lengths, admission = self._shard_over_slots(
            (tokens.reshape(-1, width), lengths.reshape(-1), admission)
        )
        return self.backend.admit(pool, tokens, lengths, admission, *self._sampler())

    def row_shape(self, plan: AdmissionPlan) -> tuple[int, int]:
        """Width and number of the prefill rows of a rank if each prompt has a row of its own."""
        return plan_unpacked_rows(plan, self.max_length, self._unit, self.scheduler.per_rank)

    def _admit_packed(self, plan: AdmissionPlan) -> tuple[SlotPool[Array], bool]:
        """Admits prompts that share rows."""
        slots, pool = self.slots, self.cache_size.grow(self._rows_pool, plan.width)
        rows = plan_rows(plan, self._row_widths)
        packing = make_packing(rows, plan, slots, self.decoder.pad_id)
        cache_copies = plan_cache_copies(rows, plan, slots, self.max_length, length_of(pool))
        tokens, admission = self._tokens_by_slot(plan)
        packed, tokens, admission = self._shard_over_slots(
            ((packing, cache_copies), tokens, admission)
        )
        assert isinstance(self.backend, MeshBackend), "no other backend packs rows"
        return self.backend.admit_packed(pool, packed, tokens, admission, *self._sampler())

    def _tokens_by_slot(
        self, plan: AdmissionPlan
    ) -> tuple[np.ndarray, AdmissionArrays[np.ndarray]]:
        """Ids ``[slot, position]`` of the admitted rows, and their arrays: the tokens, and the
        state of the last, are indexed by the slot itself."""
        admission = self._make_admission(plan, 0)
        tokens = np.full((self.slots, self.max_length), self.decoder.pad_id, np.int32)
        for slot, request, _ in plan.assignments:
            tokens[slot, : request.length] = request.ids
            admission.sources[slot] = slot % self.scheduler.per_rank
        return tokens, admission

    def _admit_extensions(self, extensions: Sequence[Extension]) -> None:
        """Admits requests that begin with the tokens of other rows."""
        assert isinstance(self.backend, MeshBackend), "no other backend extends rows"
        plan = AdmissionPlan([[]], [(each.slot, each.request, each.slot) for each in extensions])
        tokens, admission = self._shard_over_slots(self._tokens_by_slot(plan))
        self.usage.prefilled += sum(e.request.length - e.num_cached for e in extensions)
        pool = self.cache_size.grow(self._rows_pool, plan.width)
        self._pool = admit_extensions(self.backend, pool, extensions, tokens, admission)
        self._rows_changed()

    def _make_admission(self, plan: AdmissionPlan, width: int) -> AdmissionArrays[np.ndarray]:
        """Makes the arrays of an admission (`make_admission`) and counts its tokens."""
        self.usage.prefilled += sum(len(ids) for runs in plan.runs for ids in runs)
        admission = make_admission(plan, self.slots, width, self.decoder)
        slots = [slot for slot, *_ in plan.assignments]
        self.scheduler.lengths[slots] = admission.lengths[slots]
        self._limits[slots] = admission.limits[slots]
        return admission

    def _decode(
        self, running_slots: Sequence[int], max_tokens: int, min_live: int, sizes: Sequence[int]
    ) -> np.ndarray:
        """Decodes up to `max_tokens` tokens of each row, until at most `min_live` are live; returns
        the mask of live slots. `sizes` are the sizes of `step_sizes` that a step may have."""
        scheduler = self.scheduler
        lengths, limits = scheduler.lengths[running_slots], self._limits[running_slots]
        are_waiting = bool(scheduler.waiting)
        max_tokens, end = self.cache_size.plan_steps(lengths, limits, max_tokens, are_waiting)
        if not max_tokens:
            return self._read_rows()
        pool, cache_length = self.cache_size.fit(self._rows_pool, end, scheduler.longest_prefix)
        active_slots = scheduler.active_slots(sizes)
        step_limits = StepLimits(max_tokens, min_live, active_slots)
        self._pool, advanced = self.backend.decode(
            pool, cache_length, step_limits, *self._sampler()
        )
        is_live = self._read_rows()
        steps, row_steps = to_host(advanced)
        self.usage.steps += int(steps)
        num_active = self.slots if active_slots is None else len(active_slots)
        self.usage.slot_steps += int(steps) * num_active
        self.usage.row_steps += int(row_steps)
        return is_live

    def _read_rows(self) -> np.ndarray:
        """Reads the lengths of all rows; returns the mask of live slots."""
        pool = self._rows_pool
        lengths, is_live = self.backend.to_host((pool.rows.lengths, pool.live))
        # A writable copy, for rows that are admitted later.
        self.scheduler.lengths = np.array(lengths)
        heartbeat()
        return is_live

    def _collect_finished(self, slots: Sequence[int]) -> list[Trajectory]:
        """Moves the rows of these slots to the output buffer, and frees the slots."""
        if not slots:
            return []
        scheduler, buffer, rows = self.scheduler, self._output_buffer, self._rows_pool.rows
        if buffer is None or buffer.used + len(slots) > len(buffer):
            # Sized for all requests in flight: a step's batch is made of one or two buffers.
            in_flight = len(scheduler.running) + len(scheduler.waiting)
            size = bucket(in_flight, least=self.slots)
            buffer = OutputBuffer(self.decoder, self.backend.output_buffer(rows, size))
        self._output_buffer = buffer
        # Past the end and unique, as `write_to_buffer` requires.
        destinations = len(buffer) + np.arange(self.slots, dtype=np.int32)
        destinations[slots] = buffer.used + np.arange(len(slots))
        buffer.rows = self.backend.write_to_buffer(buffer.rows, rows, destinations)
        tokens, done = self.backend.to_host(rows.tokens), list[Trajectory]()
        for slot in slots:
            request, row = scheduler.free_slot(slot), buffer.used
            ids = tokens[slot, request.start : scheduler.lengths[slot]]
            done.append(Trajectory(request, ids, self._finish_reason(request, ids), buffer, row))
            buffer.used += 1
        self._rows_changed()
        return done

    def _collect_on_host(self, slots: Sequence[int]) -> list[Trajectory]:
        """Copies the rows of these slots to the host, and frees the slots."""
        if not slots:
            return []
        rows, done = to_host(self._rows_pool.rows), list[Trajectory]()
        for slot in slots:
            request = self.scheduler.free_slot(slot)
            sampled = read_sampled(rows, slot, request)
            finish = self._finish_reason(request, sampled.tokens)
            request = request._replace(sampled=sampled)
            done.append(Trajectory(request, sampled.tokens, finish, buffer=None, row=0))
        self._rows_changed()
        return done

    def _finish_reason(self, request: Request, ids: np.ndarray) -> Finish:
        if ids[-1] in self.decoder.stop_ids:
            return "stop"
        # A window ends a row below its limit; it continues in another step.
        reached_limit = len(request.response) + len(ids) == request.max_new_tokens
        return "length" if reached_limit else "window"

    def _read_recent(self, starts: np.ndarray, width: int) -> RecentTokens[np.ndarray]:
        rows = self._rows_pool.rows
        # Top-k tokens are copied to the host only if a row in flight requests them.
        if not any(request.needs_top_tokens for request in self.scheduler.running.values()):
            rows = replace(rows, top_tokens=None)
        return to_host(recent_tokens(rows, width, self._shard_over_slots(starts)))

    def _rows_changed(self) -> None:
        """Forgets the sampling parameters of rows; called when rows enter or leave slots."""
        if self._sampling is None:
            self._sampler_state = None

    def _sampler(self) -> tuple[Sampling, SamplerState]:
        """Static parameters of the samplers in compiled functions, and their arrays."""
        if self._sampler_state is None:
            self._sampler_state = self.new_sampler_state(self._sampling)
        return compiled_sampling(self._sampling), self._sampler_state

    def new_sampler_state(self, sampling: Sampling | None) -> SamplerState:
        """Arrays of the samplers in compiled functions."""
        compiled, entropy, greedy = compiled_sampling(sampling), None, None
        if sampling is not None and compiled == Sampling():
            greedy = np.bool_(sampling.greedy)
        elif compiled.adaptive is not None:
            entropy = EntropyStatistics.neutral() if self._entropy is None else self._entropy
        arrays = np.int32(self._version), to_host(entropy), greedy
        version, entropy, greedy = self._replicate(arrays)
        rows = None
        if sampling is None:
            running = self.scheduler.running
            parameters = {slot: request.sampling for slot, request in running.items()}
            stacked = stack_sampling(parameters, self.slots, self.decoder.config.vocab_size)
            rows = self._shard_over_slots(stacked)
        return SamplerState(self._key, version, entropy, rows, greedy)

    @property
    def _rows_pool(self) -> SlotPool[Array]:
        """Pool of the rows in flight."""
        assert self._pool is not None, "no rows are in flight"
        return self._pool

    def _empty_pool(self) -> SlotPool[Array]:
        pool = empty_pool(self.decoder, self.slots, self.max_length)
        first = self.cache_sizes[0]
        return pool if first == self.max_length else with_cache_length(pool, first)

    def _shard_over_slots(self, tree: Any) -> Any:
        return to_devices(tree, self.backend.slot_sharding)

    def _replicate(self, tree: Any) -> Any:
        return to_devices(tree, replicated(self.mesh))
