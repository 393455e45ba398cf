"""What is compiled before requests come is all that they need."""

from collections import Counter
from itertools import count

import jax
import numpy as np
import pytest
from policies import CONFIG, PAD, STOPS, Asked, weights

from jrl.rollout.decoding import engine as slot_engine
from jrl.rollout.decoding import packing, seating, stream
from jrl.rollout.decoding.programs import packed
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.stream import StreamEngine
from jrl.rollout.row_sampling import OwnSampling
from jrl.rollout.sampling import GREEDY
from jrl.serving import warming
from jrl.serving.warming import Warming

COLUMNS, SLOTS, WINDOW, K = 30, 8, 3, 3
KINDS = "run_packed", "place", "admit_known", "advance", "admit", "_columns", "halt"
COMPILED = Counter[str]()


@jax.monitoring.register_event_duration_secs_listener
def _count(event: str, duration_secs: float, **about: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED[str(about["fun_name"]).removeprefix("jit(").removesuffix(")")] += 1


def since(before: Counter[str]) -> dict[str, int]:
    """How many programs of each kind were compiled, or loaded."""
    return {kind: COMPILED[kind] - before[kind] for kind in KINDS}


@pytest.fixture
def small(monkeypatch):
    """The sizes of a server, in small."""
    for module, name, value in [
        (seating, "ALONE", 4),
        (seating, "SHARED", 8),
        (packed, "CHUNK", 4),
        (packing, "CHUNK", 4),
        (slot_engine, "NARROWEST", 4),
        (stream, "NARROWEST_CACHE", 16),
        (warming, "COMMON", 8),
        (StreamEngine, "most_tokens", 32),
    ]:
        monkeypatch.setattr(module, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_requests_find_their_programs(small, layout):
    mesh = Asked(GREEDY, layout).mesh
    engine = StreamEngine(
        CONFIG,
        mesh,
        mesh,
        slots=SLOTS * mesh.size(mesh.dp),
        columns=COLUMNS,
        pad_id=PAD,
        stop_ids=STOPS,
        key=jax.random.key(0),
        top_logprobs=K,
    )
    engine.load(weights(), 0)
    assert engine.prefill_sizes == [
        (4, 1),
        *[(8, rows) for rows in (1, 2, 4)],
        *[(16, rows) for rows in (1, 2)],
        (30, 1),
    ]
    assert engine.cache_sizes == [16, 24, 30] and engine.step_sizes == [1, 8]
    before, numbers = COMPILED.copy(), count()
    made = Warming(engine, lambda: next(numbers), 3, COLUMNS - 1, WINDOW)
    every = made.num_left
    made.make_common()
    common = since(before)
    # Rows of four sizes for short prompts; one size of the cache.
    assert common == dict(zip(KINDS, (4, 4, 1, 2, 0, 2, 1), strict=True))
    assert 0 < made.num_left < every
    rng = np.random.default_rng(0)

    def serve(longest: int, number: int, most: int) -> None:
        """Requests of all kinds, some of which are dropped."""
        for _ in range(number):
            length, samples = int(rng.integers(1, longest)), int(rng.integers(1, most))
            own = OwnSampling(0.7, 0.9, wants_likeliest=bool(rng.integers(2)))
            ids, limit = np.full(length, 4, np.int32), int(rng.integers(1, 5))
            name = next(numbers)
            engine.ask([Request(name, sample, ids, limit, own=own) for sample in range(samples)])
            if rng.integers(4) == 0:
                engine.drop([(name, 0)])
            if rng.integers(2):
                engine.tick(WINDOW)
        while engine.busy:
            engine.tick(WINDOW)

    serve(longest=8, number=40, most=2)
    assert since(before) == common, "a short request waited for a compiler"
    while made.num_left:
        made.make_one()
    # A program for each size of the rows; for each number of their tokens, which is 4, 8, 16, 32
    # and 30, and each size of the cache, but that 30 do not come into the narrowest; and for each
    # size of the step and of the cache. Copies are made in each size of the cache.
    everything = common | {"run_packed": 7, "place": 4 + 5 + 5, "advance": 2 * 3, "admit": 3}
    assert since(before) == everything
    serve(longest=COLUMNS - 6, number=60, most=2 * SLOTS)
    assert since(before) == everything, "a request waited for a compiler"
