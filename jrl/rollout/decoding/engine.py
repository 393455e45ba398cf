"""Rollout engine with continuous batching: where a row ends, the next takes its slot."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import to_devices, to_host
from jrl.rollout.batching import replicated
from jrl.rollout.decoding.admission_arrays import make_admission
from jrl.rollout.decoding.columns import cache_length_to_read, length_after, plan_window
from jrl.rollout.decoding.output_buffer import make_output_buffer, write_to_buffer
from jrl.rollout.decoding.programs.admission import AdmissionArrays, admit
from jrl.rollout.decoding.programs.advance import Advanced, UnstackedPolicy, advance, unstack_policy
from jrl.rollout.decoding.programs.slots import (
    Decoder,
    SlotPool,
    TokenRows,
    empty_pool,
    halt,
    over_slots,
)
from jrl.rollout.decoding.programs.tokens import SamplerState
from jrl.rollout.decoding.ranks import check_slots
from jrl.rollout.decoding.requests import Finish, OutputBuffer, Request, Trajectory, read_sampled
from jrl.rollout.decoding.scheduler import (
    REFILL_DIVISOR,
    AdmissionPlan,
    SlotScheduler,
    bucket,
    plan_unpacked_rows,
    step_sizes,
)
from jrl.rollout.decoding.usage import Usage
from jrl.rollout.resharding import RolloutPolicy, are_disjoint
from jrl.rollout.sampling import Sampling
from moe.cache.buffers import cache_columns
from moe.config import ModelConfig
from moe.implementations import check_decode_kernel
from moe.router.statistics import run_with_fallback
from moe.weights import Transformer
from sharding.folding import FoldedMesh

WINDOW = 64
"""Tokens of a row between two scheduler steps; finished rows are verified meanwhile."""


class SlotEngine:
    """Pool of decoding slots with continuous batching: where a row ends, the next takes its slot.

    A row's tokens depend on the weights, the seed, its prompt and sample ids, and the tokens so
    far: neither on its slot nor on other rows, nor on the mesh.

    Args:
      config: the policy network; adapters are merged where it decodes.
      training: the mesh that weights come from.
      rollout: the mesh that decodes, over the same devices in the same order or over others.
      slots: rows that are decoded at a time; a multiple of the ranks that share them.
      columns: tokens of the longest row, prompt and response.
      pad_id: id of padding.
      stop_ids: each of them ends a response.
      key: RNG key from which the keys of all tokens are derived.
      records_choices: true to record the expert ids of each token (router replay).
      top_logprobs: number of top tokens recorded for each position.
      prompts: usual number of prompts at a time: larger requests run in prefills of this many, not
        in one of their own size. None runs as many at once as memory allows.
    """

    most_tokens = 2**15
    """Approximate number of prompt tokens in one prefill of a rank; bounds its memory."""
    _may_shrink = False  # true if the number of live rows depends on their samples only

    def __init__(
        self,
        config: ModelConfig,
        training: FoldedMesh,
        rollout: FoldedMesh,
        *,
        slots: int,
        columns: int,
        pad_id: int,
        stop_ids: tuple[int, ...],
        key: Array,
        records_choices: bool = False,
        top_logprobs: int = 0,
        prompts: int | None = None,
    ):
        check_slots(rollout, slots)
        check_decode_kernel(config)
        self.mesh, self.slots, self._training = rollout, slots, training
        # Tokens of a forward pass are sharded over ``tp``.
        self._unit = rollout.size(rollout.tp)
        self.columns = cache_columns(columns, config, rollout)
        self.decoder = Decoder(
            config=config.without_adapters(),
            mesh=rollout,
            pad_id=pad_id,
            stop_ids=stop_ids,
            records_choices=records_choices,
            top_logprobs=top_logprobs,
        )
        self._slot_sharding = NamedSharding(rollout.mesh, over_slots(rollout))
        self.usage = Usage()
        self._resharding = RolloutPolicy(config, training, rollout)
        self._key = to_devices(jax.random.key_data(key), replicated(rollout))
        self._prompts = prompts
        self._scheduler = self._make_scheduler(slots, rollout.size(rollout.dp))
        self._weights: Transformer[Array] | None = None
        self._policy: UnstackedPolicy[Array] | None = None
        self._version, self._entropy = 0, None
        self._sampler_state: SamplerState | None = None
        self._sampling = self._state_sampling = Sampling()
        self._pool: SlotPool[Array] | None = None
        self._lengths = np.zeros(slots, np.int32)
        self._limits = np.zeros(slots, np.int32)
        self._output_buffer: OutputBuffer | None = None

    def _make_scheduler(self, slots: int, ranks: int) -> SlotScheduler:
        return SlotScheduler(
            slots,
            ranks,
            self.most_tokens,
            row_widths=self._row_widths,
            # The states of Gated DeltaNet are those of a row's last token only.
            can_copy=self.decoder.config.delta is None,
            most_prompts=None if self._prompts is None else -(-self._prompts // ranks),
        )

    @property
    def _row_widths(self) -> Sequence[int]:
        """Widths of packed prefill rows; none where each prompt has a row of its own."""
        return ()

    @property
    def step_sizes(self) -> list[int]:
        """Slots of each rank that a step may compute, ascending: each number is a compiled
        function, in which sums may round differently."""
        return step_sizes(self._scheduler.per_rank, self.columns, self._unit)

    @property
    def num_idle(self) -> int:
        return max(0, self._scheduler.num_free - len(self._scheduler.waiting))

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        # Compared by identity: every update makes a new object.
        if weights is not self._weights:
            self._scheduler.clear_prefix_cache()
            self._policy = None
        self._weights, self._version = weights, version
        if are_disjoint(self._training, self.mesh):
            # Immediately: training donates its buffers while this engine samples.
            self._resharding.sync(weights)
        # Four numbers through the host, from the training mesh to the rollout mesh.
        self._entropy, self._sampler_state = to_host(entropy), None

    def release(self) -> None:
        assert not self._scheduler.running, "rows are in flight"
        self._resharding.release()
        self._scheduler.clear_prefix_cache()
        self._weights = self._policy = self._pool = self._output_buffer = None

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        scheduler = self._scheduler
        if (scheduler.running or scheduler.waiting) and sampling != self._sampling:
            raise ValueError(
                f"requests for {sampling} cannot be served while others for {self._sampling} are "
                "in flight: poll until none is."
            )
        for request in requests:
            if request.limit > self.columns:
                raise ValueError(
                    f"a row of {request.limit} tokens does not fit slots of {self.columns} "
                    "tokens: make an engine with more columns."
                )
        self._sampling = sampling
        for request in requests:
            if request.slot is None:
                scheduler.waiting.append(request)
            else:
                scheduler.resume_in_slot(request.slot, request)
                self._lengths[request.slot] = request.length
                self._limits[request.slot] = request.limit

    def cancel(self, prompts: Sequence[int]) -> None:
        dropped = set(prompts)
        self._drop(lambda request: request.prompt in dropped)

    def _drop(self, is_dropped: Callable[[Request], bool]) -> None:
        """Aborts the selected rows and frees their slots."""
        slots = self._scheduler.drop(is_dropped)
        if slots and self._pool is not None:
            stays_live = np.ones(self.slots, bool)
            stays_live[slots] = False
            self._pool = halt(self._pool, self._shard_over_slots(stays_live))

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        scheduler, suspended = self._scheduler, list[Request]()
        if scheduler.running:
            rows = self._to_host(self._ensure_pool().rows)
            if not keep_pool:
                self._pool = halt(
                    self._ensure_pool(), self._shard_over_slots(np.zeros(self.slots, bool))
                )
            for slot in sorted(scheduler.running):
                request, retained_slot = scheduler.free_slot(slot), slot if keep_pool else None
                sampled = read_sampled(rows, slot, request)
                suspended.append(request._replace(sampled=sampled, slot=retained_slot))
        waiting = list(scheduler.waiting)
        scheduler.waiting.clear()
        return suspended + waiting

    def take_pool(self) -> SlotPool[Array]:
        pool, self._pool = self._ensure_pool(), None
        return pool

    def give_pool(self, pool: SlotPool[Array]) -> None:
        self._pool = pool

    def poll(self, draining: bool = False) -> list[Trajectory]:
        self._may_shrink = draining
        scheduler, done = self._scheduler, list[Trajectory]()
        while not done and (scheduler.waiting or scheduler.running):
            if not scheduler.running or scheduler.num_free * REFILL_DIVISOR >= self.slots:
                for plan in scheduler.schedule():
                    self._admit(plan)
            done = self._advance()
        return done

    def _admit(self, plan: AdmissionPlan) -> None:
        """Runs the prefill of an admission and writes the rows into their slots."""
        pool = self._ensure_pool()
        ranks = self._scheduler.ranks
        width, num_rows = self._row_size(plan)
        tokens = np.full((ranks, num_rows, width), self.decoder.pad_id, np.int32)
        lengths = np.zeros((ranks, num_rows), np.int32)
        for rank, runs in enumerate(plan.runs):
            for index, ids in enumerate(runs):
                tokens[rank, index, : len(ids)], lengths[rank, index] = ids, len(ids)
        admission = self._make_admission(plan, width)
        prompts, lengths, admission = self._shard_over_slots(
            (tokens.reshape(-1, width), lengths.reshape(-1), admission)
        )
        self._pool = self._run_admission(pool, prompts, lengths, admission)

    def _row_size(self, plan: AdmissionPlan) -> tuple[int, int]:
        """Width and number of the prefill rows of a rank."""
        return plan_unpacked_rows(plan, self.columns, self._unit, self._scheduler.per_rank)

    def _make_admission(self, plan: AdmissionPlan, width: int) -> AdmissionArrays[np.ndarray]:
        """Makes the arrays of an admission (`make_admission`), and updates usage, lengths and
        limits."""
        self.usage.prefilled += sum(len(ids) for runs in plan.runs for ids in runs)
        self.usage.admitted += len(plan.assignments)
        admission = make_admission(plan, self.slots, self._scheduler.per_rank, width, self.decoder)
        slots = [slot for slot, *_ in plan.assignments]
        self._lengths[slots] = admission.lengths[slots]
        self._limits[slots] = admission.limits[slots]
        return admission

    def _run_admission(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
    ) -> SlotPool[Array]:
        """Admits rows to the pool, which is donated (`programs.admission.admit`)."""
        weights = self._resharding.sync(self._loaded_weights())
        state, sampling = self._ensure_sampler_state(), self._compiled_sampling

        def run(decoder: Decoder, pool: SlotPool[Array]) -> tuple[SlotPool[Array], Array | None]:
            return admit(decoder, sampling, weights, pool, tokens, lengths, admission, state)

        pool, repeated = run_with_fallback(
            lambda: run(self.decoder, pool),
            lambda pool: run(self.decoder.for_any_routing(), pool)[0],
        )
        self.usage.repeated += repeated
        return pool

    def _run_decoding(
        self,
        pool: SlotPool[Array],
        columns: int,
        window: int,
        min_live: int,
        slots: np.ndarray | None,
    ) -> tuple[SlotPool[Array], Advanced]:
        """Decodes up to `window` tokens in every live row of the pool, which is donated; stops when
        at most `min_live` rows are live. All rows must fit into `columns` positions, and all live
        rows must be in the slots `slots`."""
        max_steps, min_rows = self._replicate((np.int32(window), np.int32(min_live)))
        return advance(
            self.decoder,
            self._compiled_sampling,
            columns,
            self._ensure_unstacked(),
            pool,
            self._ensure_sampler_state(),
            max_steps,
            min_rows,
            self._shard_over_slots(slots),
        )

    def _ensure_unstacked(self) -> UnstackedPolicy[Array]:
        """Unstacked weights for decoding steps."""
        if self._policy is None:
            self._policy = unstack_policy(
                self.decoder, self._resharding.sync(self._loaded_weights())
            )
        return self._policy

    def _advance(self) -> list[Trajectory]:
        """Decodes until the scheduler has to act, and returns the finished trajectories."""
        scheduler = self._scheduler
        running_slots = sorted(scheduler.running)
        is_live = self._sample_window(running_slots, WINDOW, scheduler.live_to_stop(self._sizes))
        ended = [slot for slot in running_slots if not is_live[slot]]
        # A conversation may continue: it is returned on the host, where its environment is.
        in_conversation = [
            slot for slot in ended if scheduler.running[slot].conversation is not None
        ]
        single_turn = [slot for slot in ended if scheduler.running[slot].conversation is None]
        return self._collect_finished(single_turn) + self._collect_on_host(in_conversation)

    @property
    def _sizes(self) -> list[int]:
        return self.step_sizes if self._may_shrink else self.step_sizes[-1:]

    def _sample_window(
        self, running_slots: Sequence[int], window: int, min_live: int
    ) -> np.ndarray:
        """Samples up to `window` tokens of each row; returns the mask of live slots."""
        pool = self._ensure_pool()
        window, end = self._plan_window(
            self._lengths[running_slots], self._limits[running_slots], window
        )
        pool, columns = self._resize_cache(pool, end)
        active_slots = self._scheduler.active_slots(self._sizes)
        pool, advanced = self._run_decoding(pool, columns, window, min_live, active_slots)
        self._pool = pool
        lengths, is_live = self._to_host((pool.rows.lengths, pool.live))
        steps, row_steps = to_host(advanced)
        # A writable copy, for rows that are admitted later.
        self._lengths = np.array(lengths)
        self.usage.steps += int(steps)
        self.usage.slot_steps += int(steps) * (
            self.slots if active_slots is None else len(active_slots)
        )
        self.usage.row_steps += int(row_steps)
        return is_live

    def _resize_cache(self, pool: SlotPool[Array], columns: int) -> tuple[SlotPool[Array], int]:
        """Pool with a cache of at least `columns` positions, donated if it changes, and the number
        of positions to read."""
        return pool, cache_length_to_read(columns, self.columns)

    def _plan_window(self, lengths: np.ndarray, limits: np.ndarray, window: int) -> tuple[int, int]:
        """Number of tokens to decode, and the maximum length of the longest row after them."""
        if self._scheduler.waiting:
            # The scheduler runs again after a few steps, when some rows have ended: copying a part
            # of the cache for so few costs more than it saves.
            return window, length_after(lengths, limits, window)
        return plan_window(lengths, limits, window, self.columns)

    def _collect_finished(self, slots: Sequence[int]) -> list[Trajectory]:
        """Moves the rows of these slots to the output buffer, and frees the slots."""
        if not slots:
            return []
        assert self._pool is not None
        scheduler, buffer = self._scheduler, self._output_buffer
        if buffer is None or buffer.used + len(slots) > len(buffer):
            # Sized for all requests in flight: a step's batch is made of one or two buffers.
            in_flight = len(scheduler.running) + len(scheduler.waiting)
            size = bucket(in_flight, least=self.slots)
            buffer = OutputBuffer(self.decoder, self._make_output_buffer(size))
        self._output_buffer = buffer
        # Past the end and unique, as `write_to_buffer` requires.
        destinations = len(buffer) + np.arange(self.slots, dtype=np.int32)
        destinations[slots] = buffer.used + np.arange(len(slots))
        buffer.rows = self._write_to_buffer(buffer.rows, destinations)
        tokens, done = self._to_host(self._pool.rows.tokens), list[Trajectory]()
        for slot in slots:
            request, row = scheduler.free_slot(slot), buffer.used
            ids = tokens[slot, request.start : self._lengths[slot]]
            done.append(Trajectory(request, ids, self._finish_reason(request, ids), buffer, row))
            buffer.used += 1
        return done

    def _collect_on_host(self, slots: Sequence[int]) -> list[Trajectory]:
        """Copies the rows of these slots to the host, and frees the slots."""
        if not slots:
            return []
        rows, done = to_host(self._ensure_pool().rows), list[Trajectory]()
        for slot in slots:
            request = self._scheduler.free_slot(slot)
            sampled = read_sampled(rows, slot, request)
            finish = self._finish_reason(request, sampled.tokens)
            request = request._replace(sampled=sampled)
            done.append(Trajectory(request, sampled.tokens, finish, buffer=None, row=0))
        return done

    def _finish_reason(self, request: Request, ids: np.ndarray) -> Finish:
        if ids[-1] in self.decoder.stop_ids:
            return "stop"
        # A window ends a row below its limit; it continues in another step.
        reached_limit = len(request.response) + len(ids) == request.max_new_tokens
        return "length" if reached_limit else "window"

    def _make_output_buffer(self, size: int) -> TokenRows[Array]:
        return make_output_buffer(self._ensure_pool().rows, size, self._slot_sharding)

    def _write_to_buffer(
        self, buffer: TokenRows[Array], destinations: np.ndarray
    ) -> TokenRows[Array]:
        """Writes the row of each slot to its position in the output buffer, which is donated; rows
        whose destination is past the end are dropped."""
        return write_to_buffer(
            buffer,
            self._ensure_pool().rows,
            self._shard_over_slots(destinations),
            self._slot_sharding,
        )

    def _to_host(self, tree: Any) -> Any:
        """Copies arrays of the mesh to the host, in all processes."""
        return to_host(tree)

    def _shard_over_slots(self, tree: Any) -> Any:
        return to_devices(tree, self._slot_sharding)

    def _ensure_pool(self) -> SlotPool[Array]:
        if self._pool is None:
            self._pool = empty_pool(self.decoder, self.slots, self.columns)
        return self._pool

    def _loaded_weights(self) -> Transformer[Array]:
        assert self._weights is not None, "no weights were loaded"
        return self._weights

    @property
    def _compiled_sampling(self) -> Sampling:
        """Static sampling parameters of the compiled functions. Greedy decoding shares those of
        `Sampling()`: it differs in an argument only (`SamplerState.greedy`)."""
        return Sampling() if self._sampling.greedy else self._sampling

    def _ensure_sampler_state(self) -> SamplerState:
        sampling, state = self._sampling, self._sampler_state
        if state is None or sampling != self._state_sampling:
            entropy = greedy = None
            if self._compiled_sampling == Sampling():
                greedy = np.bool_(sampling.greedy)
            elif sampling.adaptive is not None:
                entropy = EntropyStatistics.neutral() if self._entropy is None else self._entropy
            version, entropy, greedy = self._replicate(
                (np.int32(self._version), to_host(entropy), greedy)
            )
            state = self._sampler_state = SamplerState(self._key, version, entropy, greedy=greedy)
            self._state_sampling = sampling
        return state

    def _replicate(self, tree: Any) -> Any:
        return to_devices(tree, replicated(self.mesh))
