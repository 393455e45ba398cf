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
from jrl.rollout.decoding.carried import arrivals_of
from jrl.rollout.decoding.columns import columns_read, end_after, reach
from jrl.rollout.decoding.programs.admission import Arrivals, admit
from jrl.rollout.decoding.programs.advance import Advanced, Policy, advance, policy_of
from jrl.rollout.decoding.programs.slots import Decoder, Pool, Rows, empty_pool, halt, over_slots
from jrl.rollout.decoding.programs.tokens import Draws
from jrl.rollout.decoding.ranks import check_slots
from jrl.rollout.decoding.requests import Finish, Request, Shelf, Trajectory, sampled_in
from jrl.rollout.decoding.seating import REFILL, Arriving, Seating, bucket, own_rows, step_sizes
from jrl.rollout.decoding.shelves import empty_shelf, shelve
from jrl.rollout.decoding.usage import Usage
from jrl.rollout.resharding import RolloutPolicy, apart
from jrl.rollout.sampling import Sampling
from moe.cache.buffers import cache_columns
from moe.cache.kernel import check_kernel
from moe.config import ModelConfig
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
    _alone = False  # true if the number of live rows depends on their samples only

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
        check_kernel(config)
        self.mesh, self.slots, self._training = rollout, slots, training
        # Tokens of a forward pass are sharded over ``tp``.
        self._unit = rollout.size(rollout.tp)
        self.columns = cache_columns(columns, config, rollout)
        kept, merged = (records_choices, top_logprobs), config.without_adapters()
        self.decoder = Decoder(merged, rollout, pad_id, stop_ids, *kept)
        self._slots_place = NamedSharding(rollout.mesh, over_slots(rollout))
        self.usage = Usage()
        self._resharding = RolloutPolicy(config, training, rollout)
        self._key = to_devices(jax.random.key_data(key), replicated(rollout))
        self._prompts = prompts
        self._seating = self._made_seating(slots, rollout.size(rollout.dp))
        self._weights: Transformer[Array] | None = None
        self._policy: Policy[Array] | None = None
        self._version, self._entropy = 0, None
        self._placed_draws: Draws | None = None
        self._sampling = self._placed_for = Sampling()
        self._pool: Pool[Array] | None = None
        self._lengths = np.zeros(slots, np.int32)
        self._limits = np.zeros(slots, np.int32)
        self._shelf: Shelf | None = None

    def _made_seating(self, slots: int, ranks: int) -> Seating:
        return Seating(
            slots,
            ranks,
            self.most_tokens,
            row_widths=self._row_widths,
            # The states of Gated DeltaNet are those of a row's last token only.
            copies=self.decoder.config.delta is None,
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
        return step_sizes(self._seating.per_rank, self.columns, self._unit)

    @property
    def num_idle(self) -> int:
        return max(0, self._seating.num_free - len(self._seating.waiting))

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        # Compared by identity: every update makes a new object.
        if weights is not self._weights:
            self._seating.forget()
            self._policy = None
        self._weights, self._version = weights, version
        if apart(self._training, self.mesh):
            # Immediately: training donates its buffers while this engine samples.
            self._resharding.of(weights)
        # Four numbers through the host, from the training mesh to the rollout mesh.
        self._entropy, self._placed_draws = to_host(entropy), None

    def release(self) -> None:
        assert not self._seating.sitting, "rows are under way"
        self._resharding.release()
        self._seating.forget()
        self._weights = self._policy = self._pool = self._shelf = None

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        seating = self._seating
        if (seating.sitting or seating.waiting) and sampling != self._sampling:
            raise ValueError(
                f"requests for {sampling} cannot be served while others for {self._sampling} are "
                "under way: poll until nothing is."
            )
        for request in requests:
            if request.limit > self.columns:
                raise ValueError(
                    f"a row of {request.limit} tokens has no room in slots of {self.columns}: "
                    "make an engine with more columns."
                )
        self._sampling = sampling
        for request in requests:
            if request.slot is None:
                seating.waiting.append(request)
            else:
                seating.stay(request.slot, request)
                self._lengths[request.slot] = request.length
                self._limits[request.slot] = request.limit

    def cancel(self, prompts: Sequence[int]) -> None:
        dropped = set(prompts)
        self._drop(lambda request: request.prompt in dropped)

    def _drop(self, is_dropped: Callable[[Request], bool]) -> None:
        """Aborts the selected rows and frees their slots."""
        slots = self._seating.drop(is_dropped)
        if slots and self._pool is not None:
            goes_on = np.ones(self.slots, bool)
            goes_on[slots] = False
            self._pool = halt(self._pool, self._over_slots(goes_on))

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        seating, begun = self._seating, list[Request]()
        if seating.sitting:
            rows = self._to_host(self._there().rows)
            if not keep_pool:
                self._pool = halt(self._there(), self._over_slots(np.zeros(self.slots, bool)))
            for slot in sorted(seating.sitting):
                request, kept = seating.leave(slot), slot if keep_pool else None
                sampled = sampled_in(rows, slot, request)
                begun.append(request._replace(sampled=sampled, slot=kept))
        waiting = list(seating.waiting)
        seating.waiting.clear()
        return begun + waiting

    def take_pool(self) -> Pool[Array]:
        pool, self._pool = self._there(), None
        return pool

    def give_pool(self, pool: Pool[Array]) -> None:
        self._pool = pool

    def poll(self, alone: bool = False) -> list[Trajectory]:
        self._alone = alone
        seating, done = self._seating, list[Trajectory]()
        while not done and (seating.waiting or seating.sitting):
            if not seating.sitting or seating.num_free * REFILL >= self.slots:
                for arriving in seating.arrivals():
                    self._admit(arriving)
            done = self._advance()
        return done

    def _admit(self, arriving: Arriving) -> None:
        """Runs the prefill of an admission and writes the rows into their slots."""
        pool = self._there()
        ranks = self._seating.ranks
        width, number = self._row_size(arriving)
        tokens = np.full((ranks, number, width), self.decoder.pad_id, np.int32)
        lengths = np.zeros((ranks, number), np.int32)
        for rank, runs in enumerate(arriving.runs):
            for place, ids in enumerate(runs):
                tokens[rank, place, : len(ids)], lengths[rank, place] = ids, len(ids)
        arrivals = self._arrivals(arriving, width)
        given = self._over_slots((tokens.reshape(-1, width), lengths.reshape(-1), arrivals))
        self._pool = self._admitted(pool, *given)

    def _row_size(self, arriving: Arriving) -> tuple[int, int]:
        """Width and number of the prefill rows of a rank."""
        return own_rows(arriving, self.columns, self._unit, self._seating.per_rank)

    def _arrivals(self, arriving: Arriving, width: int) -> Arrivals[np.ndarray]:
        """Makes the arrays of an admission (`arrivals_of`), and updates usage, lengths and
        limits."""
        self.usage.prefilled += sum(len(ids) for runs in arriving.runs for ids in runs)
        self.usage.admitted += len(arriving.seats)
        arrivals = arrivals_of(arriving, self.slots, self._seating.per_rank, width, self.decoder)
        taken = [slot for slot, *_ in arriving.seats]
        self._lengths[taken] = arrivals.lengths[taken]
        self._limits[taken] = arrivals.limits[taken]
        return arrivals

    def _admitted(
        self,
        pool: Pool[Array],
        tokens: Array,
        lengths: Array,
        arrivals: Arrivals[Array],
    ) -> Pool[Array]:
        """Admits rows to the pool, which is donated (`programs.admission.admit`)."""
        weights = self._resharding.of(self._loaded())
        given = tokens, lengths, arrivals, self._draws()
        pool, overflow = admit(self.decoder, self._compiled_sampling, weights, pool, *given)
        # A sum over all devices, so that all processes decide alike; reading it blocks.
        if overflow is not None and int(overflow):
            self.usage.repeated += 1
            decoder = self.decoder.for_any_routing()
            pool, _ = admit(decoder, self._compiled_sampling, weights, pool, *given)
        return pool

    def _advanced(
        self,
        pool: Pool[Array],
        columns: int,
        window: int,
        min_live: int,
        some: np.ndarray | None,
    ) -> tuple[Pool[Array], Advanced]:
        """Decodes up to `window` tokens in every live row of the pool, which is donated; stops when
        at most `min_live` rows are live. All rows must fit into `columns` positions, and all live
        rows must be in the slots `some`."""
        limits = self._everywhere((np.int32(window), np.int32(min_live)))
        given = self._taken_apart(), pool, self._draws(), *limits, self._over_slots(some)
        return advance(self.decoder, self._compiled_sampling, columns, *given)

    def _taken_apart(self) -> Policy[Array]:
        """Unstacked weights for decoding steps."""
        if self._policy is None:
            self._policy = policy_of(self.decoder, self._resharding.of(self._loaded()))
        return self._policy

    def _advance(self) -> list[Trajectory]:
        """Decodes until the scheduler has to act, and returns the finished trajectories."""
        seating = self._seating
        sitting = sorted(seating.sitting)
        still = self._sampled(sitting, WINDOW, seating.live_to_stop(self._sizes))
        ended = [slot for slot in sitting if not still[slot]]
        # A conversation may continue: it is returned on the host, where its environment is.
        turns = [slot for slot in ended if seating.sitting[slot].turns is not None]
        alone = [slot for slot in ended if seating.sitting[slot].turns is None]
        return self._shelved(alone) + self._taken_off(turns)

    @property
    def _sizes(self) -> list[int]:
        return self.step_sizes if self._alone else self.step_sizes[-1:]

    def _sampled(self, sitting: Sequence[int], window: int, min_live: int) -> np.ndarray:
        """Samples up to `window` tokens of each row; returns the mask of live slots."""
        pool = self._there()
        window, end = self._reach(self._lengths[sitting], self._limits[sitting], window)
        pool, columns = self._with_columns(pool, end)
        some = self._seating.some(self._sizes)
        pool, advanced = self._advanced(pool, columns, window, min_live, some)
        self._pool = pool
        lengths, still = self._to_host((pool.rows.lengths, pool.live))
        steps, row_steps = to_host(advanced)
        # A writable copy, for rows that are admitted later.
        self._lengths = np.array(lengths)
        self.usage.steps += int(steps)
        self.usage.slot_steps += int(steps) * (self.slots if some is None else len(some))
        self.usage.row_steps += int(row_steps)
        return still

    def _with_columns(self, pool: Pool[Array], columns: int) -> tuple[Pool[Array], int]:
        """Pool with a cache of at least `columns` positions, donated if it changes, and the number
        of positions to read."""
        return pool, columns_read(columns, self.columns)

    def _reach(self, lengths: np.ndarray, limits: np.ndarray, window: int) -> tuple[int, int]:
        """Number of tokens to decode, and the maximum length of the longest row after them."""
        if self._seating.waiting:
            # The scheduler runs again after a few steps, when some rows have ended: copying a part
            # of the cache for so few costs more than it saves.
            return window, end_after(lengths, limits, window)
        return reach(lengths, limits, window, self.columns)

    def _shelved(self, slots: Sequence[int]) -> list[Trajectory]:
        """Moves the rows of these slots to the output buffer, and frees the slots."""
        if not slots:
            return []
        assert self._pool is not None
        seating, shelf = self._seating, self._shelf
        if shelf is None or shelf.taken + len(slots) > len(shelf):
            # Sized for all requests in flight: a step's batch is made of one or two buffers.
            under_way = len(seating.sitting) + len(seating.waiting)
            size = bucket(under_way, least=self.slots)
            shelf = Shelf(self.decoder, self._empty_shelf(size))
        self._shelf = shelf
        # Past the end and unique, as `shelve` requires.
        places = len(shelf) + np.arange(self.slots, dtype=np.int32)
        places[slots] = shelf.taken + np.arange(len(slots))
        shelf.rows = self._on_shelf(shelf.rows, places)
        tokens, done = self._to_host(self._pool.rows.tokens), list[Trajectory]()
        for slot in slots:
            request, row = seating.leave(slot), shelf.taken
            ids = tokens[slot, request.start : self._lengths[slot]]
            done.append(Trajectory(request, ids, self._finish(request, ids), shelf, row))
            shelf.taken += 1
        return done

    def _taken_off(self, slots: Sequence[int]) -> list[Trajectory]:
        """Copies the rows of these slots to the host, and frees the slots."""
        if not slots:
            return []
        rows, done = to_host(self._there().rows), list[Trajectory]()
        for slot in slots:
            request = self._seating.leave(slot)
            sampled = sampled_in(rows, slot, request)
            finish = self._finish(request, sampled.tokens)
            request = request._replace(sampled=sampled)
            done.append(Trajectory(request, sampled.tokens, finish, shelf=None, row=0))
        return done

    def _finish(self, request: Request, ids: np.ndarray) -> Finish:
        if ids[-1] in self.decoder.stop_ids:
            return "stop"
        # A window ends a row below its limit; it continues in another step.
        whole = len(request.response) + len(ids) == request.max_new_tokens
        return "length" if whole else "window"

    def _empty_shelf(self, size: int) -> Rows[Array]:
        return empty_shelf(self._there().rows, size, self._slots_place)

    def _on_shelf(self, shelf: Rows[Array], places: np.ndarray) -> Rows[Array]:
        """Writes the row of each slot to its place in the output buffer, which is donated; places
        past the end are dropped."""
        return shelve(shelf, self._there().rows, self._over_slots(places), self._slots_place)

    def _to_host(self, tree: Any) -> Any:
        """Copies arrays of the mesh to the host, in all processes."""
        return to_host(tree)

    def _over_slots(self, tree: Any) -> Any:
        return to_devices(tree, self._slots_place)

    def _there(self) -> Pool[Array]:
        if self._pool is None:
            self._pool = empty_pool(self.decoder, self.slots, self.columns)
        return self._pool

    def _loaded(self) -> Transformer[Array]:
        assert self._weights is not None, "no weights were loaded"
        return self._weights

    @property
    def _compiled_sampling(self) -> Sampling:
        """Static sampling parameters of the compiled functions. Greedy decoding shares those of
        `Sampling()`: it differs in an argument only (`Draws.greedy`)."""
        return Sampling() if self._sampling.greedy else self._sampling

    def _draws(self) -> Draws:
        sampling, placed = self._sampling, self._placed_draws
        if placed is None or sampling != self._placed_for:
            entropy = greedy = None
            if self._compiled_sampling == Sampling():
                greedy = np.bool_(sampling.greedy)
            elif sampling.adaptive is not None:
                entropy = EntropyStatistics.neutral() if self._entropy is None else self._entropy
            version, entropy, greedy = self._everywhere(
                (np.int32(self._version), to_host(entropy), greedy)
            )
            placed = self._placed_draws = Draws(self._key, version, entropy, greedy=greedy)
            self._placed_for = sampling
        return placed

    def _everywhere(self, tree: Any) -> Any:
        return to_devices(tree, replicated(self.mesh))
