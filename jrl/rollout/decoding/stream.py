"""Streaming engine for serving: tokens are returned as they are sampled, with per-request
sampling parameters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jrl.processes.agreement import to_host
from jrl.rollout.decoding.columns import length_after
from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.packing import (
    make_packing,
    plan_cache_copies,
    plan_rows,
    row_sizes,
    unpacked_row_sizes,
)
from jrl.rollout.decoding.programs.admission import AdmissionArrays, admit_prefilled
from jrl.rollout.decoding.programs.packed import copy_to_cache, run_packed
from jrl.rollout.decoding.programs.slots import (
    Decoder,
    SlotPool,
    TokenRows,
    TopTokens,
    with_columns,
)
from jrl.rollout.decoding.programs.tokens import SamplerState
from jrl.rollout.decoding.requests import Finish, Request
from jrl.rollout.decoding.scheduler import MIN_PREFILL_WIDTH, AdmissionPlan, fewer_slots, row_widths
from jrl.rollout.row_sampling import RequestSampling, RowSampling
from jrl.rollout.sampling import Sampling
from moe.cache.buffers import KEY_COLUMN, Cache
from moe.decoding import Prefilled
from moe.router.statistics import run_with_fallback

LOW_WORD_MASK = 2**32 - 1
"""The low word of a seed."""
STEPS_BEFORE_SHRINK = 32
"""Scheduler steps after which a cache that is longer than its rows need is shortened."""
MIN_STREAM_CACHE_LENGTH = 128
"""Minimum length of the cache, if rows may be so long; 1.5 times, twice that, and so on for longer
rows: a step reads the whole cache."""
STREAM_SHRINK_FACTOR = 8
"""Factor by which a step may compute fewer slots than all: each number is a compiled function."""
IDLE_SAMPLING = RequestSampling(temperature=0.0)
"""Sampling parameters of an empty slot: no noise is generated for it."""


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of a row since the last scheduler step.

    Attributes:
      request: the request.
      tokens: ``[token]`` ids, including a stop token that ended it.
      logprobs: ``[token]`` in the policy at temperature 1, nats.
      top_tokens: top-k tokens, ``[token, k]``; None where they were not requested.
      finish: the finish reason; None where it continues.
    """

    request: Request
    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: TopTokens[np.ndarray] | None
    finish: Finish | None


class _Recent(NamedTuple):
    """Latest positions of rows, ``[slot, width]``, from the first that was not returned yet."""

    tokens: Array
    logprobs: Array
    top_tokens: TopTokens[Array] | None


class StreamEngine(SlotEngine):
    """Slots that requests with any sampling parameters share, decoded a few tokens at a time.

    A row's tokens depend on the weights, the engine's key, the seed of its request, its sample id
    and the tokens so far: neither on the prompt id nor on other rows. `ask` submits requests,
    `drop` aborts them, and `tick` decodes them further. Arguments are those of `SlotEngine`.
    """

    # Small, as rows in flight wait for a prefill.
    most_tokens = 1024
    _may_shrink = True  # requests come at any time: results are not promised to be reproducible
    _too_wide = 0  # consecutive scheduler steps with a cache longer than needed

    @property
    def ranks(self) -> int:
        """Number of ``dp`` ranks, each with an equal share of the slots."""
        return self._scheduler.ranks

    @property
    def step_sizes(self) -> list[int]:
        """Slots of each rank that a step may compute, ascending: all of them, an eighth, an eighth
        of that, and so on."""
        return fewer_slots(self._scheduler.per_rank, self._unit, STREAM_SHRINK_FACTOR, least=1)

    @property
    def prefill_sizes(self) -> list[tuple[int, int]]:
        """Widths and numbers of rows in a prefill of a rank, each pair of which is a compiled
        function, ascending."""
        per_rank = self._scheduler.per_rank
        if self._row_widths:
            return row_sizes(self._row_widths, per_rank, self.most_tokens)
        widths = [min(MIN_PREFILL_WIDTH, self.columns)]
        while widths[-1] < self.columns:
            widths.append(min(2 * widths[-1], self.columns))
        widths = sorted({-(-width // self._unit) * self._unit for width in widths})
        return unpacked_row_sizes(widths, per_rank, self.most_tokens)

    @property
    def cache_sizes(self) -> list[int]:
        """Lengths that the cache may have, ascending: functions are compiled for each of them."""
        sizes = [min(MIN_STREAM_CACHE_LENGTH, self.columns)]
        while sizes[-1] < self.columns:
            half_again = sizes[-1] * 3 // 2
            sizes += [min(size, self.columns) for size in (half_again, 2 * sizes[-1])]
        return sorted({*sizes})

    def _cache_size(self, columns: int) -> int:
        return next(size for size in self.cache_sizes if size >= columns)

    @property
    def num_live(self) -> int:
        """Number of occupied slots."""
        return len(self._scheduler.running)

    @property
    def busy(self) -> bool:
        """True if any request is waiting or in flight."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def ask(self, requests: Sequence[Request]) -> None:
        """Submits requests, each with its parameters `sampling`. Those with the same prompt id
        are samples of one prompt, which is run once.

        Raises:
          ValueError: for a request without sampling parameters, or one that is too long for a slot.
        """
        for request in requests:
            if request.sampling is None:
                raise ValueError(
                    f"request {request.prompt, request.sample} has no sampling settings: give it "
                    "a sampling=RequestSampling(...)."
                )
        self.submit(requests, Sampling())

    def drop(self, rows: Collection[tuple[int, int]]) -> None:
        """Aborts rows, given by prompt and sample ids, and frees their slots."""
        dropped = set(rows)
        if dropped:
            self._drop(lambda request: (request.prompt, request.sample) in dropped)
            self._sampler_state = None

    def tick(self, window: int) -> list[StreamChunk]:
        """Admits waiting requests to free slots, and decodes all rows further.

        Args:
          window: maximum new tokens of a row, in addition to the first of its response.
        """
        scheduler = self._scheduler
        # At every scheduler step, where `SlotEngine` waits for more free slots: clients wait for an
        # answer.
        if scheduler.waiting and scheduler.num_free:
            plans = scheduler.schedule()
            self._sampler_state = None
            for plan in plans:
                self._admit(plan)
        # Including rows that finish below: their new tokens are returned too.
        running_slots = sorted(scheduler.running)
        if not running_slots:
            return []
        # Rows that were just admitted have their first token already.
        before = self._lengths.copy()
        is_live = self._sample_window(running_slots, window, 0)
        recent = self._read_recent(before, window + 1)
        chunks = [
            self._make_chunk(s, int(before[s]), recent, bool(is_live[s])) for s in running_slots
        ]
        for slot in running_slots:
            if not is_live[slot]:
                scheduler.free_slot(slot)
                self._sampler_state = None
        return chunks

    def _make_chunk(self, slot: int, begin: int, recent: _Recent, is_live: bool) -> StreamChunk:
        request = self._scheduler.running[slot]
        assert request.sampling is not None
        count = int(self._lengths[slot] - begin)
        tokens, logprobs = (np.array(x[slot, :count]) for x in recent[:2])
        top_tokens = None
        if request.sampling.needs_top_tokens and recent.top_tokens is not None:
            top_tokens = jax.tree.map(lambda x: np.array(x[slot, :count]), recent.top_tokens)
        finish = None
        if not is_live:
            finish = "stop" if tokens[-1] in self.decoder.stop_ids else "length"
        return StreamChunk(request, tokens, logprobs, top_tokens, finish)

    def _read_recent(self, starts: np.ndarray, width: int) -> _Recent:
        rows, running = self._ensure_pool().rows, self._scheduler.running.values()
        # Top-k tokens are copied to the host only if a row in flight requests them.
        if not any(
            request.sampling is not None and request.sampling.needs_top_tokens
            for request in running
        ):
            rows = replace(rows, top_tokens=None)
        return to_host(_columns(rows, width, self._shard_over_slots(starts)))

    def _admit(self, plan: AdmissionPlan) -> None:
        if not any(plan.runs) or not self._row_widths:
            super()._admit(plan)
            return
        pool, slots = self._ensure_pool(), self.slots
        cache_length = pool.cache.keys[0].shape[KEY_COLUMN]
        if cache_length < plan.width:
            cache_length = self._cache_size(plan.width)
            pool = with_columns(pool, cache_length)
        row_plan = plan_rows(plan, self._row_widths)
        packing = make_packing(row_plan, plan, slots, self.decoder.pad_id)
        cache_copies = plan_cache_copies(row_plan, plan, slots, self.columns, cache_length)
        admission = self._make_admission(plan, 0)
        tokens = np.full((slots, self.columns), self.decoder.pad_id, np.int32)
        for slot, request, _ in plan.assignments:
            tokens[slot, : request.length] = request.ids
            # The tokens, and the state of the last, are indexed by the slot itself.
            admission.sources[slot] = slot % self._scheduler.per_rank
        packing, cache_copies, tokens, admission = self._shard_over_slots(
            (packing, cache_copies, tokens, admission)
        )
        weights = self._resharding.sync(self._loaded_weights())

        def run(decoder: Decoder) -> tuple[Prefilled, Array | None]:
            prefill = run_packed(decoder, weights, packing)
            return prefill, prefill.overflow

        prefill, repeated = run_with_fallback(
            lambda: run(self.decoder), lambda _: run(self.decoder.for_any_routing())[0]
        )
        self.usage.repeated += repeated
        # The cache is handled separately: `admit_prefilled` would be compiled for each of its
        # lengths.
        cache = copy_to_cache(self.decoder, pool.cache, prefill.cache, cache_copies)
        no_cache = Cache[Array]((), ())
        pool_without_cache = replace(pool, cache=no_cache)
        prefilled = prefill._replace(cache=no_cache, overflow=None)
        pool_without_cache = admit_prefilled(
            self.decoder,
            self._compiled_sampling,
            self._ensure_unstacked().rest,
            pool_without_cache,
            prefilled,
            tokens,
            admission,
            self._ensure_sampler_state(),
        )
        self._pool = replace(pool_without_cache, cache=cache)

    def _row_size(self, plan: AdmissionPlan) -> tuple[int, int]:
        if any(plan.runs):
            return super()._row_size(plan)
        # Copies of whole rows, so that no function is compiled per length.
        cache_length = self._ensure_pool().cache.keys[0].shape[KEY_COLUMN]
        return max(cache_length, self._cache_size(plan.width)), 0

    @property
    def _row_widths(self) -> Sequence[int]:
        # Packed rows support neither the states of Gated DeltaNet nor recorded expert ids.
        if self.decoder.config.delta is not None or self.decoder.records_choices:
            return ()
        return row_widths(self.columns, self._unit)

    def _run_admission(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
    ) -> SlotPool[Array]:
        if pool.cache.keys[0].shape[KEY_COLUMN] < tokens.shape[1]:
            pool = with_columns(pool, self._cache_size(tokens.shape[1]))
        return super()._run_admission(pool, tokens, lengths, admission)

    def _resize_cache(self, pool: SlotPool[Array], columns: int) -> tuple[SlotPool[Array], int]:
        # The whole cache is read, so that no part of it is copied before and after.
        columns = self._cache_size(columns)
        cache_length = pool.cache.keys[0].shape[KEY_COLUMN]
        # Extended immediately, shortened only after a while: each change copies the whole cache.
        self._too_wide = self._too_wide + 1 if columns < cache_length else 0
        if columns <= cache_length and self._too_wide < STEPS_BEFORE_SHRINK:
            return pool, cache_length
        self._too_wide = 0
        return with_columns(pool, columns), columns

    def _plan_window(self, lengths: np.ndarray, limits: np.ndarray, window: int) -> tuple[int, int]:
        # The whole window: scheduler steps follow each other directly, and cache lengths differ.
        return window, length_after(lengths, limits, window)

    def _ensure_pool(self) -> SlotPool[Array]:
        if self._pool is None:
            self._pool = with_columns(super()._ensure_pool(), self.cache_sizes[0])
        return self._pool

    def _ensure_sampler_state(self) -> SamplerState:
        if self._sampler_state is None:
            # An entry for each slot, so that requests of any kind share one compiled function.
            parameters = [IDLE_SAMPLING] * self.slots
            for slot, request in self._scheduler.running.items():
                assert request.sampling is not None
                parameters[slot] = request.sampling
            row_sampling = RowSampling(
                temperatures=np.array([each.temperature for each in parameters], np.float32),
                top_ps=np.array([each.top_p for each in parameters], np.float32),
                # In two words: JAX has no 64-bit integers by default.
                seeds=np.array(
                    [(each.seed & LOW_WORD_MASK, each.seed >> 32) for each in parameters], np.uint32
                ),
                needs_top_tokens=np.array([each.needs_top_tokens for each in parameters]),
            )
            version = self._replicate(np.int32(self._version))
            self._sampler_state = SamplerState(
                self._key, version, None, self._shard_over_slots(row_sampling)
            )
        return self._sampler_state


@partial(jax.jit, static_argnums=1)
def _columns(rows: TokenRows[Array], width: int, starts: Int[Array, "slot"]) -> _Recent:
    """Slices `width` positions of each row from its own start; the last one repeats past the
    end."""
    positions = starts[:, None] + jnp.arange(width)[None]

    def gather(column: Array) -> Array:
        index = positions.reshape(*positions.shape, *[1] * (column.ndim - 2))
        return jnp.take_along_axis(column, index, axis=1, mode="clip")

    return _Recent(
        gather(rows.tokens), gather(rows.old_logprobs), jax.tree.map(gather, rows.top_tokens)
    )
