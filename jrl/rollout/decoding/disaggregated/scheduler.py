"""Slot allocation that balances the predicted attention time of micro-batches."""

from collections.abc import Callable, Mapping

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduler import SlotScheduler
from moe.disaggregated.schedule import AttentionTime, lightest_batch


class MicroBatchScheduler(SlotScheduler):
    """`SlotScheduler` for ranks whose slots are consecutive micro-batches: a request gets a
    slot in the micro-batch of its rank with the least predicted attention time.

    Args:
      slots, ranks, most_tokens: of `SlotScheduler`.
      num_micro_batches: micro-batches of a rank.
      predicted: model of the attention time of rows.
      context: number of tokens in a slot.
    """

    def __init__(
        self,
        slots: int,
        ranks: int,
        most_tokens: int,
        num_micro_batches: int,
        predicted: AttentionTime,
        context: Callable[[int], int],
    ):
        super().__init__(slots, ranks, most_tokens)
        self._size, self._num_micro_batches = self.per_rank // num_micro_batches, num_micro_batches
        self._predicted, self._context = predicted, context

    def _take_free_slot(self, rank: int, admitted: Mapping[int, Request]) -> int:
        first = rank * self._num_micro_batches
        free, contexts = ([list[int]() for _ in range(self._num_micro_batches)] for _ in range(2))
        for slot in self._free[rank]:
            free[slot // self._size - first].append(slot)
        # Newly admitted requests are not in their slots yet.
        each = {slot: self._context(slot) for slot in self.running}
        each |= {slot: request.length for slot, request in admitted.items()}
        for slot, length in each.items():
            if slot // self.per_rank == rank:
                contexts[slot // self._size - first].append(length)
        # By the tokens in the cache too: longer rows take attention longer.
        times = [self._predicted.batch_time(lengths) for lengths in contexts]
        slot = free[lightest_batch(times, [len(slots) for slots in free])][0]
        self._free[rank].remove(slot)
        return slot
