"""Requests sit where attention has least to do."""

import numpy as np

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling.scheduler import SlotScheduler
from jrl.rollout.decoding.split_backend import LightestMicroBatch
from moe.disaggregated.schedule import AttentionTime

RANKS, PARTS, SIZE = 2, 3, 4
PREDICTED = AttentionTime(per_token=50.0, per_cached_token=1.0)


def request(number, length):
    return Request(number, 0, np.zeros(length, np.int32), 9)


def seated(lengths):
    """A scheduler with requests of these lengths, and the tokens in each of its slots."""
    choose_slot = LightestMicroBatch(SIZE, PARTS, PREDICTED)
    scheduler = SlotScheduler(RANKS * PARTS * SIZE, RANKS, 4096, choose_slot=choose_slot)
    scheduler.waiting.extend(request(number, length) for number, length in enumerate(lengths))
    scheduler.schedule()
    return scheduler, {slot: row.length for slot, row in scheduler.running.items()}


def times(contexts):
    batches = [[] for _ in range(RANKS * PARTS)]
    for slot, length in contexts.items():
        batches[slot // SIZE].append(length)
    return [PREDICTED.batch_time(batch) for batch in batches]


def test_micro_batches_take_equally_long():
    lengths = np.random.default_rng(0).integers(1, 300, 18).tolist()
    found = np.reshape(times(seated(lengths)[1]), (RANKS, PARTS))
    # On each rank no two differ by more than one request, as of the lightest at any time.
    assert np.all(np.ptp(found, axis=1) <= PREDICTED.batch_time([max(lengths)]))
    dealt = np.reshape(times(dict(enumerate(lengths))), (RANKS, PARTS))
    assert np.ptp(found) < np.ptp(dealt) / 2


def test_who_comes_later_joins_the_lightest():
    """By the tokens that stand in the slots by then, not by those that came."""
    scheduler, contexts = seated([10] * 12)
    for slot in contexts:
        # One micro-batch of each rank has short rows, as if they had just begun.
        scheduler.lengths[slot] = 20 if slot // SIZE % PARTS == 1 else 200
    scheduler.waiting.extend(request(number, 5) for number in (100, 101))
    (program,) = scheduler.schedule()
    assert sorted(slot // SIZE for slot, *_ in program.assignments) == [1, 4]


def test_all_slots_are_taken_once():
    scheduler, _ = seated([7] * 30)
    assert sorted(scheduler.running) == list(range(RANKS * PARTS * SIZE))
    assert len(scheduler.waiting) == 6 and scheduler.num_free == 0
