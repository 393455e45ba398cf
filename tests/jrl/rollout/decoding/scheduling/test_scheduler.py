"""Prompts of nearly one length arrive in one program, and none has a say in another."""

import numpy as np
import pytest
from policies import CONFIG, Asked, answers

from jrl.rollout.decoding.requests import Request, Sampled
from jrl.rollout.decoding.scheduling.scheduler import SlotScheduler, plan_unpacked_rows
from jrl.rollout.decoding.scheduling.sizes import fewer_slots

LENGTHS = 17, 20, 32, 9
"""Of two sizes of programs: three that differ fill the same columns of one, and one is shorter."""
ASKED = Asked(columns=64, slots=len(LENGTHS))


def requests():
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, CONFIG.vocab_size, length).astype(np.int32) for length in LENGTHS]
    return [Request(number, 0, own, 12) for number, own in enumerate(ids)]


@pytest.mark.parametrize(
    ("per_rank", "unit", "fewer", "least", "expected"),
    [
        (64, 1, 8, 1, [1, 8, 64]),
        (20, 1, 8, 1, [3, 20]),
        (16, 2, 8, 1, [2, 16]),
        # No fewer than can be spread over a unit.
        (8, 2, 8, 1, [8]),
        (12, 1, 3, 1, [2, 4, 12]),
        (1000, 8, 4, 62, [64, 256, 1000]),
        (32, 1, 4, 32, [32]),
    ],
)
def test_fewer_slots_are_a_part_of_all_rounded_up(per_rank, unit, fewer, least, expected):
    assert fewer_slots(per_rank, unit, fewer, least) == expected


def test_a_size_of_programs_is_one_program():
    scheduler = SlotScheduler(len(LENGTHS), 1, most_tokens=256)
    scheduler.waiting.extend(requests())
    programs = [[len(ids) for ids in program.runs[0]] for program in scheduler.schedule()]
    assert programs == [[9], [17, 20, 32]]
    # As many as fit: three rows of 32 tokens are more than 64.
    scheduler = SlotScheduler(len(LENGTHS), 1, most_tokens=64)
    scheduler.waiting.extend(requests())
    assert [len(program.runs[0]) for program in scheduler.schedule()] == [1, 2, 1]


def test_more_prompts_run_in_programs_for_a_few():
    scheduler = SlotScheduler(len(LENGTHS), 1, most_tokens=256, most_prompts=2)
    scheduler.waiting.extend(requests())
    programs = [[len(ids) for ids in program.runs[0]] for program in scheduler.schedule()]
    assert programs == [[9], [17, 20], [32]]
    # Rows that were begun differ in number from step to step, whatever the prompts are.
    scheduler = SlotScheduler(len(LENGTHS), 1, most_tokens=256, most_prompts=2)
    tokens, numbers = np.zeros(1, np.int32), np.zeros(1, np.float32)
    sampled = Sampled(tokens, numbers, numbers, tokens, None)
    scheduler.waiting.extend(
        each._replace(tokens=each.tokens[:-1], sampled=sampled) for each in requests()
    )
    assert [len(program.runs[0]) for program in scheduler.schedule()] == [1, 3]


@pytest.mark.slow
def test_who_arrives_together_has_no_say():
    """All bits of the tokens; of log-probabilities the last digit, as products of more rows are
    summed in other blocks."""
    together = answers(ASKED.engine(), requests(), ASKED.sampling)
    alone = [answers(ASKED.engine(), [each], ASKED.sampling)[0] for each in requests()]
    assert len({len(t.tokens) for t in alone}) > 1, "all are of one length"
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        for name in ("behaviour_logprobs", "old_logprobs"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-6)


def test_no_program_is_wider_than_the_longest_row():
    lengths = [3, 33, 17, 16, 32, 20, 60, 31]
    scheduler = SlotScheduler(len(lengths), 1, most_tokens=128)
    scheduler.waiting.extend(
        Request(number, 0, np.full(length, 3, np.int32), 9) for number, length in enumerate(lengths)
    )
    programs = scheduler.schedule()
    runs = [[len(ids) for ids in program.runs[0]] for program in programs]
    assert runs == [[3, 16], [17, 32, 20, 31], [33, 60]]
    sizes = [plan_unpacked_rows(program, max_length=62, unit=1, per_rank=8) for program in programs]
    assert sizes == [(16, 2), (32, 4), (62, 2)]


def test_some_slots_are_those_with_somebody():
    scheduler = SlotScheduler(12, 2, most_tokens=64)
    for number, slot in enumerate((1, 4, 9)):
        scheduler.resume_in_slot(slot, Request(number, 0, np.zeros(3, np.int32), 9))
    # Of each rank counted from its first, filled up with others.
    assert scheduler.active_slots([2, 3, 6]).tolist() == [1, 4, 3, 0]
    assert scheduler.active_slots([3, 6]).tolist() == [1, 4, 0, 3, 0, 1]
    scheduler.resume_in_slot(2, Request(3, 0, np.zeros(3, np.int32), 9))
    assert scheduler.active_slots([2, 6]) is None, "three of a rank are more than two"
