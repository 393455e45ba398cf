"""Who sits where: requests, and the slots of the ranks that decode them, on the host."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from jrl.rollout.decoding.requests import Request

SMALLEST = 16
"""Columns of the narrowest program: below it a wider one costs nothing."""

OF_CONVERSATIONS = 64
"""The same of conversations that go on."""
ALONE, ONE_ROW = 64, 6
"""One row holds all prompts, of any lengths, up to so many tokens times 1, 2 and so on up to the
second: beyond it scores with all others of the row cost more than padding."""
SHARED = 128
"""Tokens of the narrowest of several rows that prompts share: their scores are with all others of
the row."""

REFILL = 8
"""Slots are filled again when one in so many is free: each time costs two programs, and so a few
steps of the slots that wait."""
FEWER, FEWEST = 4, 8
"""Where most rows have ended, a step computes so many times fewer of them, twice at most, and no
fewer than `FEWEST` of a rank: below it they cost as much."""
LONG = 128
"""Columns of rows that are worth programs for fewer of them."""


def bucket(size: int, most: int | None = None, least: int = SMALLEST) -> int:
    """The size of a program for `size`: `least` times a power of two, but no more than `most`.

    Few sizes are few programs to compile.
    """
    while least < size:
        least *= 2
    return least if most is None else min(least, most)


@dataclass
class Arriving:
    """Requests that come into slots in one program.

    Attributes:
      seats: slot, request and the source of each: a number of `runs` on the slot's rank, or
        ``~slot`` of another slot of the rank, which begins with the same tokens.
      runs: tokens to run on each rank.
    """

    runs: list[list[np.ndarray]]
    seats: list[tuple[int, Request, int]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return max(request.length for _, request, _ in self.seats)

    @property
    def goes_on(self) -> bool:
        """Whether some are conversations that go on: they come in groups of any size and length,
        and have fewer sizes of programs."""
        return any(map(_goes_on, (request for _, request, _ in self.seats)))


def own_rows(arriving: Arriving, columns: int, unit: int, per_rank: int) -> tuple[int, int]:
    """How wide and how many the rows of a rank are where each has a prompt of its own.

    Args:
      columns: tokens of the longest row.
      unit: what the width is a multiple of.
      per_rank: slots of a rank.
    """
    # They come at any length, and each width is a program.
    least = OF_CONVERSATIONS if arriving.goes_on else SMALLEST
    # Rounded up after the bucket: tokens that run together are spread over the ranks of `unit`.
    width = -(-bucket(arriving.width, columns, least) // unit) * unit
    # The rank with most decides: the program has one shape on all.
    most = max(map(len, arriving.runs))
    # Few of each: every width with every number of rows is a program.
    number = bucket(most, least=1) if most else 0
    if arriving.goes_on and most:
        number = max(number, min(per_rank, _coarse(most)))
    return width, number


def _coarse(rows: int) -> int:
    """8, 32, 128, ...: few sizes, for programs that are asked for with any number of rows."""
    size = 8
    while size < rows:
        size *= 4
    return size


def _goes_on(request: Request) -> bool:
    # The first turn is a prompt like any other, and its run is shared.
    return request.turns is not None and request.begun


def step_sizes(per_rank: int, columns: int, unit: int) -> list[int]:
    """`fewer_slots` of a rank whose rows are all of one rollout and have so many columns."""
    # Short rows end before a program for fewer of them has paid for its compilation.
    least = max(FEWEST, per_rank // FEWER**2) if columns >= LONG else per_rank
    return fewer_slots(per_rank, unit, FEWER, least)


def fewer_slots(per_rank: int, unit: int, fewer: int, least: int) -> list[int]:
    """How many slots of a rank a step may compute, ascending: all, and so many times fewer, again
    and again.

    Args:
      unit: what each number is a multiple of.
      least: of them but for all.
    """
    sizes = [per_rank]
    while sizes[0] // fewer >= max(least, unit):
        sizes.insert(0, -(-sizes[0] // fewer // unit) * unit)
    return sizes


def row_widths(columns: int, unit: int) -> list[int]:
    """All widths of rows that prompts share, ascending: `ALONE`, of which `one_row` is made, then
    `SHARED` and that times powers of two, up to the longest row.

    Args:
      columns: tokens of the longest row.
      unit: what the width of a row is a multiple of.
    """
    # The first is for one row of all prompts, the others for rows that prompts share: `one_row`
    # multiplies it and `shared_width` passes it over.
    widths = [min(ALONE, columns), min(SHARED, columns)]
    while widths[-1] < columns:
        widths.append(min(2 * widths[-1], columns))
    return sorted({-(-width // unit) * unit for width in widths})


def one_row(widths: Sequence[int], tokens: int | None = None) -> list[int]:
    """The widths of one row that holds so many tokens, ascending; None is all of them.

    Args:
      widths: `row_widths`.
    """
    # Not the exact length, though it would pad nothing: each width is a program.
    multiples = (widths[0] * times for times in range(1, ONE_ROW + 1))
    return [width for width in multiples if tokens is None or width >= tokens]


def shared_width(widths: Sequence[int], longest: int) -> int:
    """The width, of `row_widths`, of rows in which prompts up to this length stand beside
    others."""
    return next((w for w in widths[1:] if w >= longest), widths[-1])


class Seating:
    """Slots, rank after rank, the requests in them and those before the door.

    Args:
      slots: in all.
      ranks: that have an equal part of the slots each.
      most_tokens: to be run on a rank in one program, about.
      row_widths: of rows in which prompts are run one behind another, ascending (`row_widths`);
        without any, each has a row of its own.
      copies: whether a row may begin as one that has gone on since, of which a cache with columns
        still holds the beginning.
      most_prompts: rows that a rank runs in one program, where they are prompts alone and each has
        a row of its own; None is as many as `most_tokens` hold. Each number is a program.
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
        self._most_prompts = most_prompts
        # Each process seats for itself: nothing below may depend on more than requests and what
        # ended, which are the same in all.
        self._row_widths, self._copies = row_widths, copies
        self.sitting: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self._free = self._all_free()
        # Of a rank and a prompt, a slot that begins with it, as the loaded weights ran it.
        self._begins: dict[tuple[int, int], int] = {}

    def _all_free(self) -> list[deque[int]]:
        per_rank = self.per_rank
        return [deque(range(r * per_rank, (r + 1) * per_rank)) for r in range(self.ranks)]

    def some(self, sizes: Sequence[int]) -> np.ndarray | None:
        """``[ranks * size]`` slots of each rank, counted from its first, with all in which somebody
        sits: as many as the smallest of ascending `sizes` that has room for them. None is all."""
        taken: list[list[int]] = [[] for _ in range(self.ranks)]
        # By their numbers and not as they came: the same slots make the same sums.
        for slot in sorted(self.sitting):
            taken[slot // self.per_rank].append(slot % self.per_rank)
        size = next(size for size in sizes if size >= max(map(len, taken)))
        # All are computed where they stand; only fewer are gathered and put back.
        if size == self.per_rank:
            return None
        # Filled up with slots in which nobody sits: all ranks compute equally many, none twice.
        for own in taken:
            others = sorted({*range(self.per_rank)} - {*own})
            own.extend(others[: size - len(own)])
        return np.array(taken, np.int32).reshape(-1)

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def live_to_stop(self, sizes: Sequence[int]) -> int:
        """How few rows must be live for the host to look again.

        Args:
          sizes: slots of each rank that a step may compute, ascending.
        """
        live = len(self.sitting)
        if self.waiting:
            # Some free slots that others can take.
            return max(live - max(1, self.per_rank * self.ranks // REFILL), 0)
        # A step may compute fewer then, at the latest where a rank has them all; or all have ended.
        fewer = [size * ranks for size in sizes[:-1] for ranks in {1, self.ranks}]
        return max((number for number in fewer if number < live), default=0)

    def stay(self, slot: int, request: Request) -> None:
        """A request keeps the slot that it had, which must be free."""
        # Its keys and values are there: in another slot it would go on with those of another row.
        self._free[slot // self.per_rank].remove(slot)
        self.sitting[slot] = request

    def leave(self, slot: int) -> Request:
        """The request of a slot, which is free from here on."""
        # Behind the others, so that what stands in it can be copied for as long as possible.
        self._free[slot // self.per_rank].append(slot)
        return self.sitting.pop(slot)

    def drop(self, is_dropped: Callable[[Request], bool]) -> list[int]:
        """Such requests wait and sit no more; the slots that are free from here on."""
        kept = [request for request in self.waiting if not is_dropped(request)]
        self.waiting.clear()
        self.waiting.extend(kept)
        slots = [slot for slot, request in self.sitting.items() if is_dropped(request)]
        for slot in slots:
            self.leave(slot)
        return slots

    def forget(self) -> None:
        """What stands in the slots was made by other weights than the next rows are."""
        self._begins.clear()
        if not self.sitting:
            # Who comes next sits as in an engine that has just been made.
            self._free = self._all_free()

    def arrivals(self) -> list[Arriving]:
        """Seats those who wait, first come first served, as far as there are free slots.

        Samples of a prompt sit on one rank if they can, and the prompt is run once for all of them.

        Returns:
          Programs, to be run in this order.
        """
        # Copies come first: the slot that is copied may be taken by another row in this call.
        copies = Arriving([[] for _ in range(self.ranks)])
        programs: dict[int, list[Arriving]] = {}
        begun: dict[tuple[int, int], tuple[Arriving, int]] = {}
        taken: dict[int, Request] = {}
        # Nobody is passed over for a slot that would suit better: groups must come to their end in
        # about the order of their prompts, or a step waits for its first.
        while self.waiting and self.num_free:
            request = self.waiting.popleft()
            # A row that was begun has tokens of its own after the prompt, so it runs alone.
            alike = None if request.begun else request.prompt
            rank = self._rank_for(alike, begun)
            slot = self._slot(rank, taken)
            taken[slot] = request
            # A slot holds its prompt's keys and values, ended or not, until another row takes it.
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
        # Within one call samples share the run itself; later a state has moved on with its row.
        if not self._copies:
            taken = {}
        # Slots that were taken hold no more what they held; those that begin with a prompt alone
        # can be copied from now on.
        self._begins = {key: slot for key, slot in self._begins.items() if slot not in taken} | {
            (slot // self.per_rank, request.prompt): slot
            for slot, request in taken.items()
            if not request.begun
        }
        # By width and not as they came: equal requests run equal programs in equal order.
        of_width = [program for _, several in sorted(programs.items()) for program in several]
        # Without a seat there is nothing to copy, and a program all the same.
        return [copies] * bool(copies.seats) + self._in_one_row(of_width)

    def _slot(self, rank: int, taken: Mapping[int, Request]) -> int:
        """A free slot of the rank, which is free no more.

        Args:
          taken: the requests that have been seated in the same call.
        """
        # The one that has been free for longest: what stands in the others may be copied yet.
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
        # To where most are free, so that ranks fill evenly; the first of equals, in all processes.
        return int(np.argmax(free))

    def _with_room(
        self, programs: dict[int, list[Arriving]], rank: int, request: Request
    ) -> Arriving:
        """The program for a row of its length: the longest decides what all rows of one cost."""
        if self._row_widths:
            width = shared_width(self._row_widths, request.length)
        else:
            least = OF_CONVERSATIONS if _goes_on(request) else SMALLEST
            width = bucket(request.length, least=least)
        several = programs.setdefault(width, [])
        # The last alone is looked at: those before it were full when it was begun.
        if not several or self._is_full(several[-1].runs[rank], request, width):
            several.append(Arriving([[] for _ in range(self.ranks)]))
        return several[-1]

    def _in_one_row(self, programs: list[Arriving]) -> list[Arriving]:
        """One program of all, where a row of each rank holds them."""
        of_ranks = zip(*(program.runs for program in programs), strict=True)
        tokens = max((sum(map(len, chain(*runs))) for runs in of_ranks), default=0)
        # A program costs more than the padding of a few prompts: one row of different lengths beats
        # a program for each width, as long as scores with the others of the row are few.
        if len(programs) < 2 or not self._row_widths or not one_row(self._row_widths, tokens):
            return programs
        together = Arriving([[] for _ in range(self.ranks)])
        for program in programs:
            before = list(map(len, together.runs))
            for runs, own in zip(together.runs, program.runs, strict=True):
                runs += own
            together.seats += [
                # The runs of a rank are counted on from those of the programs before.
                (slot, request, before[slot // self.per_rank] + source)
                for slot, request, source in program.seats
            ]
        return [together]

    def _is_full(self, runs: list[np.ndarray], request: Request, width: int) -> bool:
        """Whether a program with these rows on a rank has no room for one more."""
        if not self._row_widths:
            most = self._most_prompts
            if most is not None and not request.begun and len(runs) >= most:
                return True
            # Padding counts: all rows of a program are as wide.
            return (len(runs) + 1) * width > self._most_tokens
        # One row at least: prompts wider than that share one all the same.
        most = max(1, self._most_tokens // width)
        # Packed as `plan_rows` will: what counts is the rows that it takes.
        starts = first_fit([*map(len, runs), request.length], width)
        return max(starts) >= most * width


def first_fit(lengths: Sequence[int], width: int) -> list[int]:
    """Where each of some rows begins, which go one after another into the first of `width` tokens
    that has room, counted through."""
    starts, taken = list[int](), list[int]()
    # In the order given, though longest first would pack tighter: where a row begins may not depend
    # on those after it, as `_is_full` asks for one more at a time.
    for length in lengths:
        free = (row for row, used in enumerate(taken) if used + length <= width)
        row = next(free, len(taken))
        if row == len(taken):
            taken.append(0)
        starts.append(row * width + taken[row])
        taken[row] += length
    return starts
