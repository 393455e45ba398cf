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
from jrl.rollout.decoding.columns import end_after
from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.packing import copies_of, own_sizes, packing_of, plan_rows, row_sizes
from jrl.rollout.decoding.programs.admission import Arrivals, admit_known
from jrl.rollout.decoding.programs.packed import place, run_packed
from jrl.rollout.decoding.programs.slots import Likeliest, Pool, Rows, with_columns
from jrl.rollout.decoding.programs.tokens import Draws
from jrl.rollout.decoding.requests import Finish, Request
from jrl.rollout.decoding.seating import SMALLEST, Arriving, fewer_slots, row_widths
from jrl.rollout.row_sampling import OwnSampling, RowSampling
from jrl.rollout.sampling import Sampling
from moe.cache.buffers import KEY_COLUMN, Cache

WORD = 2**32 - 1
"""The low word of a seed."""
PATIENCE = 32
"""Scheduler steps after which a cache that is longer than its rows need is shortened."""
NARROWEST_CACHE = 128
"""Minimum length of the cache, if rows may be so long; 1.5 times, twice that, and so on for longer
rows: a step reads the whole cache."""
FEWER = 8
"""Factor by which a step may compute fewer slots than all: each number is a compiled function."""
IDLE = OwnSampling(temperature=0.0)
"""Sampling parameters of an empty slot: no noise is generated for it."""


@dataclass(frozen=True)
class Written:
    """New tokens of a row since the last scheduler step.

    Attributes:
      request: the request.
      tokens: ``[token]`` ids, including a stop token that ended it.
      logprobs: ``[token]`` in the policy at temperature 1, nats.
      likeliest: top-k tokens, ``[token, k]``; None where they were not requested.
      finish: the finish reason; None where it continues.
    """

    request: Request
    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: Likeliest[np.ndarray] | None
    finish: Finish | None


class _Recent(NamedTuple):
    """Latest positions of rows, ``[slot, width]``, from the first that was not returned yet."""

    tokens: Array
    logprobs: Array
    likeliest: Likeliest[Array] | None


class StreamEngine(SlotEngine):
    """Slots that requests with any sampling parameters share, decoded a few tokens at a time.

    A row's tokens depend on the weights, the engine's key, the seed of its request, its sample id
    and the tokens so far: neither on the prompt id nor on other rows. `ask` submits requests,
    `drop` aborts them, and `tick` decodes them further. Arguments are those of `SlotEngine`.
    """

    # Small, as rows in flight wait for a prefill.
    most_tokens = 1024
    _alone = True  # requests come at any time: results are not promised to be reproducible
    _too_wide = 0  # consecutive scheduler steps with a cache longer than needed

    @property
    def ranks(self) -> int:
        """Number of ``dp`` ranks, each with an equal share of the slots."""
        return self._seating.ranks

    @property
    def step_sizes(self) -> list[int]:
        """Slots of each rank that a step may compute, ascending: all of them, an eighth, an eighth
        of that, and so on."""
        return fewer_slots(self._seating.per_rank, self._unit, FEWER, least=1)

    @property
    def prefill_sizes(self) -> list[tuple[int, int]]:
        """Widths and numbers of rows in a prefill of a rank, each pair of which is a compiled
        function, ascending."""
        per_rank = self._seating.per_rank
        if self._row_widths:
            return row_sizes(self._row_widths, per_rank, self.most_tokens)
        widths = [min(SMALLEST, self.columns)]
        while widths[-1] < self.columns:
            widths.append(min(2 * widths[-1], self.columns))
        widths = sorted({-(-width // self._unit) * self._unit for width in widths})
        return own_sizes(widths, per_rank, self.most_tokens)

    @property
    def cache_sizes(self) -> list[int]:
        """Lengths that the cache may have, ascending: functions are compiled for each of them."""
        sizes = [min(NARROWEST_CACHE, self.columns)]
        while sizes[-1] < self.columns:
            half_again = sizes[-1] * 3 // 2
            sizes += [min(size, self.columns) for size in (half_again, 2 * sizes[-1])]
        return sorted({*sizes})

    def _cache_size(self, columns: int) -> int:
        return next(size for size in self.cache_sizes if size >= columns)

    @property
    def num_live(self) -> int:
        """Number of occupied slots."""
        return len(self._seating.sitting)

    @property
    def busy(self) -> bool:
        """True if any request is waiting or in flight."""
        return bool(self._seating.sitting or self._seating.waiting)

    def ask(self, requests: Sequence[Request]) -> None:
        """Submits requests, each with its sampling parameters `own`. Those with the same prompt id
        are samples of one prompt, which is run once.

        Raises:
          ValueError: for a request without sampling parameters, or one that is too long for a slot.
        """
        for request in requests:
            if request.own is None:
                raise ValueError(
                    f"request {request.prompt, request.sample} does not say how it is drawn: give "
                    "it an own=OwnSampling(...)."
                )
        self.submit(requests, Sampling())

    def drop(self, rows: Collection[tuple[int, int]]) -> None:
        """Aborts rows, given by prompt and sample ids, and frees their slots."""
        dropped = set(rows)
        if dropped:
            self._drop(lambda request: (request.prompt, request.sample) in dropped)
            self._placed_draws = None

    def tick(self, window: int) -> list[Written]:
        """Admits waiting requests to free slots, and decodes all rows further.

        Args:
          window: maximum new tokens of a row, in addition to the first of its response.
        """
        seating = self._seating
        # At every scheduler step, where `SlotEngine` waits for more free slots: clients wait for an
        # answer.
        if seating.waiting and seating.num_free:
            arrivals = seating.arrivals()
            self._placed_draws = None
            for arriving in arrivals:
                self._admit(arriving)
        # Including rows that finish below: their new tokens are returned too.
        sitting = sorted(seating.sitting)
        if not sitting:
            return []
        # Rows that were just admitted have their first token already.
        before = self._lengths.copy()
        still = self._sampled(sitting, window, 0)
        recent = self._recent(before, window + 1)
        written = [self._written(s, int(before[s]), recent, bool(still[s])) for s in sitting]
        for slot in sitting:
            if not still[slot]:
                seating.leave(slot)
                self._placed_draws = None
        return written

    def _written(self, slot: int, begin: int, recent: _Recent, goes_on: bool) -> Written:
        request = self._seating.sitting[slot]
        assert request.own is not None
        count = int(self._lengths[slot] - begin)
        tokens, logprobs = (np.array(x[slot, :count]) for x in recent[:2])
        likeliest = None
        if request.own.wants_likeliest and recent.likeliest is not None:
            likeliest = jax.tree.map(lambda x: np.array(x[slot, :count]), recent.likeliest)
        finish = None
        if not goes_on:
            finish = "stop" if tokens[-1] in self.decoder.stop_ids else "length"
        return Written(request, tokens, logprobs, likeliest, finish)

    def _recent(self, begins: np.ndarray, width: int) -> _Recent:
        rows, sitting = self._there().rows, self._seating.sitting.values()
        # Top-k tokens are copied to the host only if a row in flight requests them.
        if not any(request.own is not None and request.own.wants_likeliest for request in sitting):
            rows = replace(rows, likeliest=None)
        return to_host(_columns(rows, width, self._over_slots(begins)))

    def _admit(self, arriving: Arriving) -> None:
        if not any(arriving.runs) or not self._row_widths:
            super()._admit(arriving)
            return
        pool, slots = self._there(), self.slots
        room = pool.cache.keys[0].shape[KEY_COLUMN]
        if room < arriving.width:
            room = self._cache_size(arriving.width)
            pool = with_columns(pool, room)
        plan = plan_rows(arriving, self._row_widths)
        packing = packing_of(plan, arriving, slots, self.decoder.pad_id)
        copies = copies_of(plan, arriving, slots, self.columns, room)
        arrivals = self._arrivals(arriving, 0)
        tokens = np.full((slots, self.columns), self.decoder.pad_id, np.int32)
        for slot, request, _ in arriving.seats:
            tokens[slot, : request.length] = request.ids
            # The tokens, and the state of the last, are indexed by the slot itself.
            arrivals.sources[slot] = slot % self._seating.per_rank
        packing, copies, tokens, arrivals = self._over_slots((packing, copies, tokens, arrivals))
        weights = self._resharding.of(self._loaded())
        ran = run_packed(self.decoder, weights, packing)
        if ran.overflow is not None and int(ran.overflow):
            self.usage.repeated += 1
            ran = run_packed(self.decoder.for_any_routing(), weights, packing)
        # The cache is handled separately: with it `admit_known` would be compiled for each of its
        # lengths.
        cache, nothing = place(self.decoder, pool.cache, ran.cache, copies), Cache[Array]((), ())
        rest = replace(pool, cache=nothing)
        known = ran._replace(cache=nothing, overflow=None)
        given = self._taken_apart().rest, rest, known, tokens, arrivals, self._draws()
        rest = admit_known(self.decoder, self._compiled_sampling, *given)
        self._pool = replace(rest, cache=cache)

    def _row_size(self, arriving: Arriving) -> tuple[int, int]:
        if any(arriving.runs):
            return super()._row_size(arriving)
        # Copies of whole rows, so that no function is compiled per length.
        room = self._there().cache.keys[0].shape[KEY_COLUMN]
        return max(room, self._cache_size(arriving.width)), 0

    @property
    def _row_widths(self) -> Sequence[int]:
        # Packed rows support neither the states of Gated DeltaNet nor recorded expert ids.
        if self.decoder.config.delta is not None or self.decoder.records_choices:
            return ()
        return row_widths(self.columns, self._unit)

    def _admitted(
        self,
        pool: Pool[Array],
        tokens: Array,
        lengths: Array,
        arrivals: Arrivals[Array],
    ) -> Pool[Array]:
        if pool.cache.keys[0].shape[KEY_COLUMN] < tokens.shape[1]:
            pool = with_columns(pool, self._cache_size(tokens.shape[1]))
        return super()._admitted(pool, tokens, lengths, arrivals)

    def _with_columns(self, pool: Pool[Array], columns: int) -> tuple[Pool[Array], int]:
        # The whole cache is read, so that no part of it is copied before and after.
        columns = self._cache_size(columns)
        room = pool.cache.keys[0].shape[KEY_COLUMN]
        # Extended immediately, shortened only after a while: each change copies the whole cache.
        self._too_wide = self._too_wide + 1 if columns < room else 0
        if columns <= room and self._too_wide < PATIENCE:
            return pool, room
        self._too_wide = 0
        return with_columns(pool, columns), columns

    def _reach(self, lengths: np.ndarray, limits: np.ndarray, window: int) -> tuple[int, int]:
        # The whole window: scheduler steps follow each other directly, and cache lengths differ.
        return window, end_after(lengths, limits, window)

    def _there(self) -> Pool[Array]:
        if self._pool is None:
            self._pool = with_columns(super()._there(), self.cache_sizes[0])
        return self._pool

    def _draws(self) -> Draws:
        if self._placed_draws is None:
            # An entry for each slot, so that requests of any kind share one compiled function.
            own = [IDLE] * self.slots
            for slot, request in self._seating.sitting.items():
                assert request.own is not None
                own[slot] = request.own
            rows = RowSampling(
                temperatures=np.array([each.temperature for each in own], np.float32),
                top_ps=np.array([each.top_p for each in own], np.float32),
                # In two words: JAX has no 64-bit integers by default.
                seeds=np.array([(each.seed & WORD, each.seed >> 32) for each in own], np.uint32),
                wants_likeliest=np.array([each.wants_likeliest for each in own]),
            )
            version = self._everywhere(np.int32(self._version))
            self._placed_draws = Draws(self._key, version, None, self._over_slots(rows))
        return self._placed_draws


@partial(jax.jit, static_argnums=1)
def _columns(rows: Rows[Array], width: int, begins: Int[Array, "slot"]) -> _Recent:
    """Slices `width` positions of each row from its own start; the last one repeats past the
    end."""
    places = begins[:, None] + jnp.arange(width)[None]

    def of(column: Array) -> Array:
        there = places.reshape(*places.shape, *[1] * (column.ndim - 2))
        return jnp.take_along_axis(column, there, axis=1, mode="clip")

    return _Recent(of(rows.tokens), of(rows.old_logprobs), jax.tree.map(of, rows.likeliest))
