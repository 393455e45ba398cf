"""How full the slots are kept: what the benchmark of rollouts rests on."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from policies import CONFIG, PROMPT, Asked, answers

from jrl.rollout.decoding.requests import Request
from jrl.rollout.sampling import Sampling

SLOTS, MEDIAN, NUMBER = 4, 4, 192
RESPONSE, NEVER = 8 * MEDIAN, CONFIG.vocab_size
DENSE = replace(CONFIG, num_experts=0, d_ff=16)


def heavy_tailed() -> list[int]:
    """Quantiles of the log-normal whose longest is 8 times the median, in a drawn order."""
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((place + 0.5) / NUMBER) for place in range(NUMBER)]
    lengths = [round(MEDIAN * math.exp(math.log(8) * score / scores[-1])) for score in scores]
    assert max(lengths) == 8 * MEDIAN and min(lengths) >= 0
    return np.random.default_rng(0).permutation(np.maximum(lengths, 1)).tolist()


@pytest.fixture(scope="module")
def served():
    """The engine after all requests at once, and after batches of as many as it has slots."""
    sizes = {"slots": SLOTS, "response": RESPONSE, "columns": PROMPT + RESPONSE}
    asked = Asked(Sampling(), stops=(NEVER,), config=DENSE, records_choices=False, **sizes)
    prompt = np.arange(PROMPT, dtype=np.int32)
    requests = [
        # The same prompt again and again is run once.
        Request(0, sample, prompt, length)
        for sample, length in enumerate(heavy_tailed())
    ]
    full, fixed = asked.engine(), asked.engine()
    at_once = answers(full, requests, asked.sampling)
    in_batches = [
        t
        for first in range(0, NUMBER, SLOTS)
        for t in answers(fixed, requests[first : first + SLOTS], asked.sampling)
    ]
    return full.usage, fixed.usage, at_once, in_batches


@pytest.mark.slow
def test_slots_are_kept_full_where_fixed_batches_wait(served):
    full, fixed, *_ = served
    assert full.utilisation >= 0.9
    assert fixed.utilisation < 0.6
    assert full.utilisation >= 1.5 * fixed.utilisation


@pytest.mark.slow
def test_room_and_tokens_are_counted(served):
    """A token that an admission samples needs no step; every other is one slot's step."""
    full, fixed, *_ = served
    steps = sum(heavy_tailed()) - NUMBER
    assert full.row_steps == fixed.row_steps == steps
    assert full.slot_steps % SLOTS == fixed.slot_steps % SLOTS == 0
    longest = np.reshape(heavy_tailed(), (-1, SLOTS)).max(axis=1)
    assert fixed.slot_steps == SLOTS * (longest - 1).sum()


@pytest.mark.slow
def test_batches_have_no_say_in_what_is_drawn(served):
    *_, at_once, in_batches = served
    for one, other in zip(at_once, in_batches, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
