"""Rows in micro-batches that attention takes equally long for."""

from collections.abc import Callable, Mapping

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.seating import Seating
from moe.disaggregated.batches import Predicted, lightest


class BatchedSeating(Seating):
    """`Seating` in ranks whose slots are micro-batches, one after the other: a request sits in that
    of its rank which is predicted to have least to do.

    Args:
      slots, ranks, most_tokens: of `Seating`.
      parts: micro-batches of a rank.
      predicted: how long attention works on a row.
      context: the tokens that stand in a slot.
    """

    def __init__(
        self,
        slots: int,
        ranks: int,
        most_tokens: int,
        parts: int,
        predicted: Predicted,
        context: Callable[[int], int],
    ):
        super().__init__(slots, ranks, most_tokens)
        self._size, self._parts = self.per_rank // parts, parts
        self._predicted, self._context = predicted, context

    def _slot(self, rank: int, taken: Mapping[int, Request]) -> int:
        first = rank * self._parts
        free, contexts = ([list[int]() for _ in range(self._parts)] for _ in range(2))
        for slot in self._free[rank]:
            free[slot // self._size - first].append(slot)
        # Those who have just come are not in their slots yet.
        each = {slot: self._context(slot) for slot in self.sitting}
        each |= {slot: request.length for slot, request in taken.items()}
        for slot, length in each.items():
            if slot // self.per_rank == rank:
                contexts[slot // self._size - first].append(length)
        # By the tokens in the cache too: rows that stand further on keep attention longer.
        times = [self._predicted.of_batch(lengths) for lengths in contexts]
        slot = free[lightest(times, [len(slots) for slots in free])][0]
        self._free[rank].remove(slot)
        return slot
