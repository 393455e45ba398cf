"""Rows that arrive together run together."""

import numpy as np

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.seating import Seating, own_rows


def test_rows_of_about_the_same_length_are_one_program():
    lengths = [3, 33, 17, 16, 32, 20, 60, 31]
    seating = Seating(len(lengths), 1, most_tokens=128)
    seating.waiting.extend(
        Request(number, 0, np.full(length, 3, np.int32), 9) for number, length in enumerate(lengths)
    )
    programs = seating.arrivals()
    runs = [[len(ids) for ids in program.runs[0]] for program in programs]
    assert runs == [[3, 16], [17, 32, 20, 31], [33, 60]]
    # None is wider than the longest row.
    sizes = [own_rows(program, columns=62, unit=1, per_rank=8) for program in programs]
    assert sizes == [(16, 2), (32, 4), (62, 2)]
    # A fifth row of 32 would be more tokens than a program runs.
    for slot in range(5):
        seating.leave(slot)
    seating.waiting.extend(
        Request(number, 0, np.full(30, 3, np.int32), 9) for number in range(10, 15)
    )
    assert [len(program.runs[0]) for program in seating.arrivals()] == [4, 1]
