"""Scheduler of the decoding slots: admission of waiting requests to slots, on the host."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from jrl.rollout.decoding.requests import Request

SMALLEST = 16
"""Minimum width of a prefill: narrower ones would not be faster."""

OF_CONVERSATIONS = 64
"""Minimum width of a prefill with continued conversations."""
ALONE, ONE_ROW = 64, 6
"""Unit and maximum multiple of the width of a single row for all prompts, of any lengths: in longer
rows the attention scores between different prompts cost more than padding."""
SHARED = 128
"""Minimum width where prompts share multiple rows: attention computes scores between all tokens of
a row."""

REFILL = 8
"""Slots are refilled when one of this many is free: each admission costs two dispatches, which take
as long as a few steps of the waiting slots."""
FEWER, FEWEST = 4, 8
"""Factor by which a step computes fewer slots where most rows have ended, twice at most, and the
minimum per rank: fewer than `FEWEST` take as long."""
LONG = 128
"""Minimum length of rows for which it pays to compile steps with fewer slots."""


def bucket(size: int, most: int | None = None, least: int = SMALLEST) -> int:
    """Rounds `size` up to `least` times a power of two, but no more than `most`.

    Few sizes mean few functions to compile.
    """
    while least < size:
        least *= 2
    return least if most is None else min(least, most)


@dataclass
class Arriving:
    """Requests that are admitted to slots by one prefill.

    Attributes:
      seats: slot, request and the source of each: an index into `runs` of the slot's rank, or
        ``~slot`` of another slot of the rank, which starts with the same tokens.
      runs: token sequences to run on each rank.
    """

    runs: list[list[np.ndarray]]
    seats: list[tuple[int, Request, int]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return max(request.length for _, request, _ in self.seats)

    @property
    def goes_on(self) -> bool:
        """True if some are continued conversations, which come in groups of any size and length:
        fewer prefill sizes are compiled for them."""
        return any(map(_goes_on, (request for _, request, _ in self.seats)))


def own_rows(arriving: Arriving, columns: int, unit: int, per_rank: int) -> tuple[int, int]:
    """Width and number of the prefill rows of a rank where each prompt has a row of its own.

    Args:
      columns: tokens of the longest row.
      unit: divisor of the width.
      per_rank: slots of a rank.
    """
    # Conversations come at any length, and each width is a compiled function.
    least = OF_CONVERSATIONS if arriving.goes_on else SMALLEST
    # Rounded up after the bucket: tokens of a prefill are sharded over the ranks of `unit`.
    width = -(-bucket(arriving.width, columns, least) // unit) * unit
    # The maximum over ranks: the compiled function has one shape on all.
    most = max(map(len, arriving.runs))
    # Few of each: every width with every number of rows is a compiled function.
    number = bucket(most, least=1) if most else 0
    if arriving.goes_on and most:
        number = max(number, min(per_rank, _coarse(most)))
    return width, number


def _coarse(rows: int) -> int:
    """Rounds a number of rows up to 8, 32, 128, ...: few sizes for any number of rows."""
    size = 8
    while size < rows:
        size *= 4
    return size


def _goes_on(request: Request) -> bool:
    # The first turn is a prompt like any other, whose prefill is shared.
    return request.turns is not None and request.begun


def step_sizes(per_rank: int, columns: int, unit: int) -> list[int]:
    """Slots of a rank that a step may compute (`fewer_slots`), for rows of one rollout with at most
    `columns` tokens."""
    # Short rows end before a step with fewer slots has paid for its compilation.
    least = max(FEWEST, per_rank // FEWER**2) if columns >= LONG else per_rank
    return fewer_slots(per_rank, unit, FEWER, least)


def fewer_slots(per_rank: int, unit: int, fewer: int, least: int) -> list[int]:
    """Numbers of slots of a rank that a step may compute, ascending: all, and repeatedly `fewer`
    times fewer.

    Args:
      unit: divisor of each number except the last.
      least: the minimum, except for the last.
    """
    sizes = [per_rank]
    while sizes[0] // fewer >= max(least, unit):
        sizes.insert(0, -(-sizes[0] // fewer // unit) * unit)
    return sizes


def row_widths(columns: int, unit: int) -> list[int]:
    """All widths of packed rows, ascending: `ALONE`, the unit of `one_row`, then `SHARED` times
    powers of two, up to the longest row.

    Args:
      columns: tokens of the longest row.
      unit: divisor of the widths.
    """
    # The first is for a single row of all prompts, the others for multiple packed rows: `one_row`
    # multiplies it and `shared_width` skips it.
    widths = [min(ALONE, columns), min(SHARED, columns)]
    while widths[-1] < columns:
        widths.append(min(2 * widths[-1], columns))
    return sorted({-(-width // unit) * unit for width in widths})


def one_row(widths: Sequence[int], tokens: int | None = None) -> list[int]:
    """Widths of a single row that holds `tokens`, ascending; None returns all widths.

    Args:
      widths: `row_widths`.
    """
    # Not the exact length, though it would not need padding: each width is a compiled function.
    multiples = (widths[0] * times for times in range(1, ONE_ROW + 1))
    return [width for width in multiples if tokens is None or width >= tokens]


def shared_width(widths: Sequence[int], longest: int) -> int:
    """Width, of `row_widths`, of rows that pack prompts of up to `longest` tokens with others."""
    return next((w for w in widths[1:] if w >= longest), widths[-1])


class Seating:
    """Slot allocation: slots, rank after rank, the requests in them and the waiting queue.

    Args:
      slots: total number.
      ranks: number of ranks, each with an equal share of the slots.
      most_tokens: approximate number of tokens in one prefill of a rank.
      row_widths: of packed rows, ascending (`row_widths`); without any, each prompt has a row of
        its own.
      copies: true if a prompt may be copied from a slot whose row has continued since: a KV cache
        still contains the prompt, a recurrent state does not.
      most_prompts: maximum number of rows in one prefill of a rank, where each is a prompt in a row
        of its own; None is as many as `most_tokens` allow. Each number is a compiled function.
    """

    def __init__(
        self,
        slots: int,
        ranks: int,
        most_tokens: int,
        *,
        row_widths: Sequence[int] = (),
        copies: bool = True,
        most_prompts: int | None = None,
    ):
        self.per_rank, self.ranks, self._most_tokens = slots // ranks, ranks, most_tokens
        # Each process schedules for itself: everything below may depend only on requests and
        # finished rows, which are the same in all.
        self._most_prompts = most_prompts
        self._row_widths, self._copies = row_widths, copies
        self.sitting: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self._free = self._all_free()
        # Prefix cache: for rank and prompt, a slot whose row starts with the prompt, as computed by
        # the loaded weights.
        self._begins: dict[tuple[int, int], int] = {}

    def _all_free(self) -> list[deque[int]]:
        per_rank = self.per_rank
        return [deque(range(r * per_rank, (r + 1) * per_rank)) for r in range(self.ranks)]

    def some(self, sizes: Sequence[int]) -> np.ndarray | None:
        """Slots that a step computes, ``[ranks * size]``, counted from each rank's first. They
        include all occupied ones; their number is the smallest sufficient one of ascending `sizes`.
        None is all."""
        taken: list[list[int]] = [[] for _ in range(self.ranks)]
        # Sorted by index, not by arrival: equal slots give equal sums.
        for slot in sorted(self.sitting):
            taken[slot // self.per_rank].append(slot % self.per_rank)
        size = next(size for size in sizes if size >= max(map(len, taken)))
        # All slots are computed in place; only a subset is gathered and scattered back.
        if size == self.per_rank:
            return None
        # Padded with empty slots: all ranks compute equally many, none twice.
        for own in taken:
            others = sorted({*range(self.per_rank)} - {*own})
            own.extend(others[: size - len(own)])
        return np.array(taken, np.int32).reshape(-1)

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def live_to_stop(self, sizes: Sequence[int]) -> int:
        """Number of live rows at which the scheduler runs again.

        Args:
          sizes: slots of each rank that a step may compute, ascending.
        """
        live = len(self.sitting)
        if self.waiting:
            # Enough free slots for waiting requests.
            return max(live - max(1, self.per_rank * self.ranks // REFILL), 0)
        # A step may compute fewer slots then, at the latest where one rank has all live rows; or
        # all have ended.
        fewer = [size * ranks for size in sizes[:-1] for ranks in {1, self.ranks}]
        return max((number for number in fewer if number < live), default=0)

    def stay(self, slot: int, request: Request) -> None:
        """Assigns a suspended request to the slot that it had, which must be free."""
        # Its KV cache is there: in another slot it would continue with that of another row.
        self._free[slot // self.per_rank].remove(slot)
        self.sitting[slot] = request

    def leave(self, slot: int) -> Request:
        """Frees a slot and returns its request."""
        # Last in the queue of free slots, so that its prompt can be copied for as long as possible.
        self._free[slot // self.per_rank].append(slot)
        return self.sitting.pop(slot)

    def drop(self, is_dropped: Callable[[Request], bool]) -> list[int]:
        """Drops the selected requests from queue and slots; returns the freed slots."""
        kept = [request for request in self.waiting if not is_dropped(request)]
        self.waiting.clear()
        self.waiting.extend(kept)
        slots = [slot for slot, request in self.sitting.items() if is_dropped(request)]
        for slot in slots:
            self.leave(slot)
        return slots

    def forget(self) -> None:
        """Clears the prefix cache, as new weights were loaded."""
        self._begins.clear()
        if not self.sitting:
            # Slots are assigned as in a new engine.
            self._free = self._all_free()

    def arrivals(self) -> list[Arriving]:
        """Admits waiting requests to free slots, FIFO.

        Samples of a prompt get slots of one rank if possible, and the prompt is run once for all.

        Returns:
          Admissions, to be run in this order.
        """
        # Copies come first: the source slot may be taken by another row in this call.
        copies = Arriving([[] for _ in range(self.ranks)])
        programs: dict[int, list[Arriving]] = {}
        begun: dict[tuple[int, int], tuple[Arriving, int]] = {}
        taken: dict[int, Request] = {}
        # Strictly FIFO, with no wait for a better slot: groups must finish in about the order of
        # their prompts, or a step waits for its first.
        while self.waiting and self.num_free:
            request = self.waiting.popleft()
            # A resumed row has tokens of its own after the prompt, so its prefill is not shared.
            alike = None if request.begun else request.prompt
            rank = self._rank_for(alike, begun)
            slot = self._slot(rank, taken)
            taken[slot] = request
            # A slot holds its prompt's KV cache, finished or not, until another row takes it.
            if alike is not None and (rank, alike) in self._begins:
                copies.seats.append((slot, request, ~self._begins[rank, alike]))
                continue
            if alike is not None and (rank, alike) in begun:
                program, number = begun[rank, alike]
            else:
                program = self._with_room(programs, rank, request)
                number = len(program.runs[rank])
                program.runs[rank].append(request.ids)
                if alike is not None:
                    begun[rank, alike] = program, number
            program.seats.append((slot, request, number))
        self.sitting |= taken
        # Within one call samples share the prefill; later a recurrent state has advanced with its
        # row.
        if not self._copies:
            taken = {}
        # Reassigned slots lose their entries; those that start with a prompt only can be copied
        # from now on.
        self._begins = {key: slot for key, slot in self._begins.items() if slot not in taken} | {
            (slot // self.per_rank, request.prompt): slot
            for slot, request in taken.items()
            if not request.begun
        }
        # Sorted by width, not by arrival: equal requests run equal functions in equal order.
        of_width = [program for _, several in sorted(programs.items()) for program in several]
        # Without copies that admission would be an empty dispatch.
        return [copies] * bool(copies.seats) + self._in_one_row(of_width)

    def _slot(self, rank: int, taken: Mapping[int, Request]) -> int:
        """Takes a free slot of the rank.

        Args:
          taken: the requests that were admitted in the same call.
        """
        # The one that has been free for longest: prompts in the others may still be copied.
        return self._free[rank].popleft()

    def _rank_for(
        self, alike: int | None, begun: dict[tuple[int, int], tuple[Arriving, int]]
    ) -> int:
        if self.ranks == 1:
            return 0
        free = [len(slots) for slots in self._free]
        if alike is not None:
            # A copy within a rank moves nothing between devices.
            for rank in range(self.ranks):
                if free[rank] and ((rank, alike) in self._begins or (rank, alike) in begun):
                    return rank
        # The rank with most free slots, so that ranks fill evenly; the first of equals.
        return int(np.argmax(free))

    def _with_room(
        self, programs: dict[int, list[Arriving]], rank: int, request: Request
    ) -> Arriving:
        """Admission with space for the request, among those of its width: the longest row
        determines the cost of all rows of a prefill."""
        if self._row_widths:
            width = shared_width(self._row_widths, request.length)
        else:
            least = OF_CONVERSATIONS if _goes_on(request) else SMALLEST
            width = bucket(request.length, least=least)
        several = programs.setdefault(width, [])
        # Only the last is checked: those before it were full when it was started.
        if not several or self._is_full(several[-1].runs[rank], request, width):
            several.append(Arriving([[] for _ in range(self.ranks)]))
        return several[-1]

    def _in_one_row(self, programs: list[Arriving]) -> list[Arriving]:
        """Merges all admissions into one if a single row of each rank holds them."""
        of_ranks = zip(*(program.runs for program in programs), strict=True)
        tokens = max((sum(map(len, chain(*runs))) for runs in of_ranks), default=0)
        # A dispatch costs more than the padding of a few prompts: one row of different lengths is
        # faster than a prefill for each width, as long as the row is short.
        if len(programs) < 2 or not self._row_widths or not one_row(self._row_widths, tokens):
            return programs
        together = Arriving([[] for _ in range(self.ranks)])
        for program in programs:
            before = list(map(len, together.runs))
            for runs, own in zip(together.runs, program.runs, strict=True):
                runs += own
            together.seats += [
                # Indices of runs are offset by the runs of the admissions before.
                (slot, request, before[slot // self.per_rank] + source)
                for slot, request, source in program.seats
            ]
        return [together]

    def _is_full(self, runs: list[np.ndarray], request: Request, width: int) -> bool:
        """True if a prefill with these rows on a rank has no space for one more."""
        if not self._row_widths:
            most = self._most_prompts
            if most is not None and not request.begun and len(runs) >= most:
                return True
            # With padding: all rows of a prefill have the same width.
            return (len(runs) + 1) * width > self._most_tokens
        # At least one row, even if that is wider than `most_tokens`.
        most = max(1, self._most_tokens // width)
        # Packed as by `plan_rows`: the limit is on the rows that it needs.
        starts = first_fit([*map(len, runs), request.length], width)
        return max(starts) >= most * width


def first_fit(lengths: Sequence[int], width: int) -> list[int]:
    """Offsets of sequences packed by first fit into bins of `width` tokens, in the concatenated
    bins."""
    starts, taken = list[int](), list[int]()
    # In the order given, though longest first would pack tighter: an offset may not depend on later
    # sequences, as `_is_full` adds one at a time.
    for length in lengths:
        free = (row for row, used in enumerate(taken) if used + length <= width)
        row = next(free, len(taken))
        if row == len(taken):
            taken.append(0)
        starts.append(row * width + taken[row])
        taken[row] += length
    return starts
