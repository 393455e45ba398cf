"""Scheduler of the decoding slots: admission of waiting requests to slots, on the host."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from jrl.rollout.decoding.requests import Request, StreamChunk
from jrl.rollout.decoding.scheduling.prefix_cache import Extension, PrefixCache
from jrl.rollout.decoding.scheduling.sizes import (
    MIN_PREFILL_WIDTH,
    bucket,
    row_count,
    shared_width,
    single_row_widths,
)

ChooseSlot = Callable[[Sequence[int], Mapping[int, int]], int]
"""Chooses one of the free slots of a rank, by them and the tokens in its occupied slots."""

MIN_TURN_WIDTH = 64
"""Minimum width of a prefill with continued conversations."""
REFILL_DIVISOR = 8
"""Slots are refilled when one of this many is free: each admission costs two dispatches, which take
as long as a few steps of the waiting slots."""


@dataclass
class AdmissionPlan:
    """Requests that are admitted to slots by one prefill.

    Attributes:
      assignments: slot, request and the source of each: an index into `runs` of the slot's rank, or
        ``~slot`` of another slot of the rank, which starts with the same tokens.
      runs: token sequences to run on each rank.
    """

    runs: list[list[np.ndarray]]
    assignments: list[tuple[int, Request, int]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return max(request.length for _, request, _ in self.assignments)

    @property
    def continues_conversations(self) -> bool:
        """True if some are continued conversations, which come in groups of any size and length:
        fewer prefill sizes are compiled for them."""
        return any(_continues_conversation(request) for _, request, _ in self.assignments)


def plan_unpacked_rows(
    plan: AdmissionPlan, max_length: int, unit: int, per_rank: int
) -> tuple[int, int]:
    """Width and number of the prefill rows of a rank if each prompt has a row of its own;
    for the arguments see `sizes.unpacked_row_sizes`."""
    # Conversations come at any length, and each width is a compiled function.
    least = MIN_TURN_WIDTH if plan.continues_conversations else MIN_PREFILL_WIDTH
    # Rounded up after the bucket: tokens of a prefill are sharded over the ranks of `unit`.
    width = -(-bucket(plan.width, max_length, least) // unit) * unit
    # The maximum over ranks: the compiled function has one shape on all.
    most = max(map(len, plan.runs))
    # Few of each: every width with every number of rows is a compiled function.
    num_rows = row_count(most)
    if plan.continues_conversations and most:
        num_rows = max(num_rows, bucket(most, per_rank, least=8, factor=4))
    return width, num_rows


def _continues_conversation(request: Request) -> bool:
    # The first turn is a prompt like any other, whose prefill is shared.
    return request.conversation is not None and request.has_response


class SlotScheduler:
    """Slot allocation: slots, rank after rank, the requests in them and the waiting queue.

    Args:
      slots: total number.
      ranks: number of ranks, each with an equal share of the slots.
      most_tokens: approximate number of tokens in one prefill of a rank.
      row_widths: widths of packed rows, ascending (`row_widths`); if empty, each prompt has a row
        of its own.
      can_copy: true if a prompt may be copied from a slot whose row has continued since: a KV cache
        still contains the prompt, a recurrent state does not.
      most_prompts: maximum number of rows in one prefill of a rank, if each prompt has a row of its
        own; None is as many as `most_tokens` allow. Each number is a compiled function.
      choose_slot: chooses the slot of a request on its rank; None takes the one that has been free
        for longest.
      min_prefix: fewest cached tokens with which a request may begin (`PrefixCache`); None runs all
        tokens of each prompt.

    Attributes:
      lengths: ``[slot]`` tokens in each slot, as far as the host was told.
    """

    def __init__(
        self,
        slots: int,
        ranks: int,
        most_tokens: int,
        *,
        row_widths: Sequence[int] = (),
        can_copy: bool = True,
        most_prompts: int | None = None,
        choose_slot: ChooseSlot | None = None,
        min_prefix: int | None = None,
    ):
        self.per_rank, self.ranks, self._most_tokens = slots // ranks, ranks, most_tokens
        # Each process schedules for itself: everything below may depend only on requests and
        # finished rows, which are the same in all.
        self._most_prompts = most_prompts
        self._row_widths, self._can_copy = row_widths, can_copy
        self._choose_slot = choose_slot
        self.lengths = np.zeros(slots, np.int32)
        self.running: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self._free: list[deque[int]] = []
        # Prefix cache: for rank and prompt, a slot whose row starts with the prompt, as computed by
        # the loaded weights.
        self._prefix_slots: dict[tuple[int, int], int] = {}
        self.prefixes = None if min_prefix is None else PrefixCache(min_prefix, self.per_rank)
        self.reset()

    def active_slots(self, sizes: Sequence[int]) -> np.ndarray | None:
        """Slots that a step computes, ``[ranks * size]``, counted from each rank's first. They
        include all occupied ones; their number is the smallest sufficient one of ascending `sizes`.
        None is all."""
        active: list[list[int]] = [[] for _ in range(self.ranks)]
        # Sorted by index, not by arrival: equal slots give equal sums.
        for slot in sorted(self.running):
            active[slot // self.per_rank].append(slot % self.per_rank)
        size = next(size for size in sizes if size >= max(map(len, active)))
        # All slots are computed in place; only a subset is gathered and scattered back.
        if size == self.per_rank:
            return None
        # Padded with empty slots: all ranks compute equally many, none twice.
        for rank_slots in active:
            others = sorted({*range(self.per_rank)} - {*rank_slots})
            rank_slots.extend(others[: size - len(rank_slots)])
        return np.array(active, np.int32).reshape(-1)

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def live_to_stop(self, sizes: Sequence[int]) -> int:
        """Number of live rows at which the scheduler runs again; `sizes` are the sizes of
        `active_slots`."""
        live = len(self.running)
        if self.waiting:
            # Enough free slots for waiting requests.
            return max(live - max(1, self.per_rank * self.ranks // REFILL_DIVISOR), 0)
        # A step may compute fewer slots then, at the latest if one rank has all live rows; or
        # all have ended.
        fewer = [size * ranks for size in sizes[:-1] for ranks in {1, self.ranks}]
        return max((num_slots for num_slots in fewer if num_slots < live), default=0)

    def resume_in_slot(self, slot: int, request: Request) -> None:
        """Assigns a suspended request to the slot that it had, which must be free."""
        # Its KV cache is there: in another slot it would continue with the cache of another row.
        self._free[slot // self.per_rank].remove(slot)
        self.running[slot], self.lengths[slot] = request, request.length

    def free_slot(self, slot: int) -> Request:
        """Frees a slot and returns its request."""
        # Last in the queue of free slots, so that its prompt can be copied for as long as possible.
        self._free[slot // self.per_rank].append(slot)
        return self.running.pop(slot)

    def drop(self, is_dropped: Callable[[Request], bool]) -> list[int]:
        """Drops the selected requests from queue and slots; returns the freed slots."""
        self.waiting = deque(request for request in self.waiting if not is_dropped(request))
        slots = [slot for slot, request in self.running.items() if is_dropped(request)]
        for slot in slots:
            self.free_slot(slot)
        return slots

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache, as weights were loaded."""
        self._prefix_slots.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def reset(self) -> None:
        """Clears the prefix cache, and the order of the free slots: they are assigned as in a new
        engine. No request is in flight."""
        assert not self.running, "rows are in flight"
        self.clear_prefix_cache()
        per_rank = self.per_rank
        self._free = [deque(range(r * per_rank, (r + 1) * per_rank)) for r in range(self.ranks)]

    @property
    def longest_prefix(self) -> int:
        """Tokens of the longest row that requests may begin with."""
        return 0 if self.prefixes is None else self.prefixes.longest

    def note_tokens(self, chunks: Sequence[StreamChunk]) -> None:
        """Notes new tokens of rows, with which later requests may begin."""
        if self.prefixes is not None:
            for chunk in chunks:
                self.prefixes.append(chunk.slot, chunk.tokens)

    def num_cached(self, slot: int) -> int:
        """Tokens of the prompt in a slot that came from the prefix cache."""
        return 0 if self.prefixes is None else self.prefixes.num_cached.get(slot, 0)

    def schedule_extensions(self) -> list[Extension]:
        """Admits the requests, among as many of the first as there are free slots, that begin with
        the tokens of another row."""
        if self.prefixes is None:
            return []
        candidates = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.num_free))]
        extensions, others = self.prefixes.plan(candidates, self._free)
        self.waiting.extendleft(reversed(others))
        extended = {extension.slot: extension.request for extension in extensions}
        self.running |= extended
        # Their state after the prompt is not kept, which a copy would begin with.
        remaining = self._prefix_slots.items()
        self._prefix_slots = {key: slot for key, slot in remaining if slot not in extended}
        return extensions

    def schedule(self) -> list[AdmissionPlan]:
        """Admits waiting requests to free slots, FIFO.

        Samples of a prompt get slots of one rank if possible, and the prompt is run once for all.

        Returns:
          Admissions, to be run in this order.
        """
        # Copies come first: the source slot may be taken by another row in this call.
        copy_plan = AdmissionPlan([[] for _ in range(self.ranks)])
        plans_by_width: dict[int, list[AdmissionPlan]] = {}
        scheduled_runs: dict[tuple[int, int], tuple[AdmissionPlan, int]] = {}
        admitted: dict[int, Request] = {}
        # Strictly FIFO, with no wait for a better slot: groups must finish in about the order of
        # their prompts, or a step waits for its first.
        while self.waiting and self.num_free:
            request = self.waiting.popleft()
            # A resumed row has tokens of its own after the prompt, so its prefill is not shared.
            shared_prompt = None if request.has_response else request.prompt
            rank = self._choose_rank(shared_prompt, scheduled_runs)
            slot = self._take_free_slot(rank, admitted)
            admitted[slot] = request
            key = None if shared_prompt is None else (rank, shared_prompt)
            # A slot holds its prompt's KV cache, finished or not, until another row takes it.
            if key in self._prefix_slots:
                copy_plan.assignments.append((slot, request, ~self._prefix_slots[key]))
                continue
            if key in scheduled_runs:
                plan, run = scheduled_runs[key]
            else:
                plan = self._find_plan(plans_by_width, rank, request)
                run = len(plan.runs[rank])
                plan.runs[rank].append(request.ids)
                if key is not None:
                    scheduled_runs[key] = plan, run
            plan.assignments.append((slot, request, run))
        self.running |= admitted
        if self.prefixes is not None:
            for slot, request in admitted.items():
                self.prefixes.put(slot, request.ids)
        # Within one call samples share the prefill; later a recurrent state has advanced with its
        # row.
        if not self._can_copy:
            admitted = {}
        # Reassigned slots lose their entries; those that start with a prompt only can be copied
        # from now on.
        reusable = {key: slot for key, slot in self._prefix_slots.items() if slot not in admitted}
        for slot, request in admitted.items():
            if not request.has_response:
                reusable[slot // self.per_rank, request.prompt] = slot
        self._prefix_slots = reusable
        # Sorted by width, not by arrival: equal requests run equal functions in equal order.
        in_width_order = [plan for _, plans in sorted(plans_by_width.items()) for plan in plans]
        # Without copies that admission would be an empty dispatch.
        return [copy_plan] * bool(copy_plan.assignments) + self._merge_into_single_row(
            in_width_order
        )

    def _take_free_slot(self, rank: int, admitted: Mapping[int, Request]) -> int:
        """Takes a free slot of the rank; `admitted` are the requests of the same call, by slot."""
        free = self._free[rank]
        if self._choose_slot is None:
            # Prompts in the slots that were freed later may still be copied.
            return free.popleft()
        # Newly admitted requests are not in their slots yet.
        occupied = {slot: int(self.lengths[slot]) for slot in self.running}
        occupied |= {slot: request.length for slot, request in admitted.items()}
        slots = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        slot = self._choose_slot(free, {s: n for s, n in occupied.items() if s in slots})
        free.remove(slot)
        return slot

    def _choose_rank(
        self,
        shared_prompt: int | None,
        scheduled_runs: dict[tuple[int, int], tuple[AdmissionPlan, int]],
    ) -> int:
        if self.ranks == 1:
            return 0
        free = [len(slots) for slots in self._free]
        # A copy within a rank moves nothing between devices.
        for rank in range(self.ranks):
            key = rank, shared_prompt
            if free[rank] and (key in self._prefix_slots or key in scheduled_runs):
                return rank
        # The rank with most free slots, so that ranks fill evenly; the first of equals.
        return int(np.argmax(free))

    def _find_plan(
        self, plans_by_width: dict[int, list[AdmissionPlan]], rank: int, request: Request
    ) -> AdmissionPlan:
        """Admission with space for the request, among the plans of its width: the longest row
        determines the cost of all rows of a prefill."""
        if self._row_widths:
            width = shared_width(self._row_widths, request.length)
        else:
            least = MIN_TURN_WIDTH if _continues_conversation(request) else MIN_PREFILL_WIDTH
            width = bucket(request.length, least=least)
        plans = plans_by_width.setdefault(width, [])
        # Only the last is checked: those before it were full when it was started.
        if not plans or self._is_full(plans[-1].runs[rank], request, width):
            plans.append(AdmissionPlan([[] for _ in range(self.ranks)]))
        return plans[-1]

    def _merge_into_single_row(self, plans: list[AdmissionPlan]) -> list[AdmissionPlan]:
        """Merges all admissions into one if a single row of each rank holds them."""
        if len(plans) < 2 or not self._row_widths:
            return plans
        of_ranks = zip(*(plan.runs for plan in plans), strict=True)
        tokens = max(sum(map(len, chain(*runs))) for runs in of_ranks)
        # A dispatch costs more than the padding of a few prompts: one row of different lengths is
        # faster than a prefill for each width, as long as the row is short.
        if not single_row_widths(self._row_widths, tokens):
            return plans
        merged = AdmissionPlan([[] for _ in range(self.ranks)])
        for plan in plans:
            num_runs = list(map(len, merged.runs))
            for runs, more_runs in zip(merged.runs, plan.runs, strict=True):
                runs += more_runs
            merged.assignments += [
                # Indices of runs are offset by the runs of the admissions before.
                (slot, request, num_runs[slot // self.per_rank] + source)
                for slot, request, source in plan.assignments
            ]
        return [merged]

    def _is_full(self, runs: list[np.ndarray], request: Request, width: int) -> bool:
        """True if a prefill with these rows on a rank has no space for one more."""
        if not self._row_widths:
            most = self._most_prompts
            if most is not None and not request.has_response and len(runs) >= most:
                return True
            # With padding: all rows of a prefill have the same width.
            return (len(runs) + 1) * width > self._most_tokens
        # At least one row, even if that is wider than `most_tokens`.
        most = max(1, self._most_tokens // width)
        # Packed as by `plan_rows`: the limit is on the rows that it needs.
        starts = first_fit([*map(len, runs), request.length], width)
        return max(starts) >= most * width


def first_fit(lengths: Sequence[int], width: int, max_sequences: int | None = None) -> list[int]:
    """Offsets of sequences packed by first fit into bins of `width` tokens, and of at most
    `max_sequences`, in the concatenated bins."""
    starts, row_tokens, row_sequences = list[int](), list[int](), list[int]()
    # In the order given, though longest first would pack tighter: an offset may not depend on later
    # sequences, as `_is_full` adds one at a time.
    for length in lengths:
        free = (
            row
            for row, used in enumerate(row_tokens)
            if used + length <= width and row_sequences[row] != max_sequences
        )
        row = next(free, len(row_tokens))
        if row == len(row_tokens):
            row_tokens.append(0)
            row_sequences.append(0)
        starts.append(row * width + row_tokens[row])
        row_tokens[row] += length
        row_sequences[row] += 1
    return starts
