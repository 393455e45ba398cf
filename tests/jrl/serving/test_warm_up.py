"""What is compiled before requests come is all that they need."""

from collections import Counter
from dataclasses import replace
from itertools import count

import jax
import numpy as np
import pytest
from policies import CONFIG, PAD, STOPS, Asked, weights

from jrl.rollout.adjustments import Adjustments
from jrl.rollout.decoding import packed_prompts
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling import scheduler, sizes
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.decoding.split_backend import DeviceSplit, SplitBackend
from jrl.rollout.sampling import GREEDY, RequestSampling
from jrl.serving import warm_up
from jrl.serving.warm_up import WarmUp, fill_prompts
from moe.disaggregated.split import Split, fold_split

COLUMNS, SLOTS, WINDOW, K = 30, 8, 3, 3
KINDS = (
    "run_packed",
    "copy_to_cache",
    "admit_prefilled",
    "advance",
    "admit",
    "recent_tokens",
    "halt",
    "extend",
    "copy_row",
    "admit_cached",
)
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
        (sizes, "SINGLE_ROW_UNIT", 4),
        (sizes, "MIN_SHARED_WIDTH", 8),
        (packed_prompts, "CHUNK", 4),
        (sizes, "MIN_CACHE_LENGTH", 4),
        (sizes, "MIN_STREAM_CACHE_LENGTH", 16),
        (warm_up, "SHORT_PROMPT", 8),
    ]:
        monkeypatch.setattr(module, name, value)


def serve(
    engine, numbers, rng, longest: int, number: int, max_prompts: int, adjusts: bool = False
) -> None:
    """Requests of all kinds, some of which are dropped."""
    for _ in range(number):
        length, samples = int(rng.integers(1, longest)), int(rng.integers(1, max_prompts))
        adjustments = Adjustments(top_k=2) if adjusts and rng.integers(2) else None
        needs_top_tokens = bool(rng.integers(2))
        own = RequestSampling(0.7, 0.9, 0, needs_top_tokens, adjustments)
        ids, limit = np.full(length, 4, np.int32), int(rng.integers(1, 5))
        name = next(numbers)
        engine.submit(
            [Request(name, sample, ids, limit, sampling=own) for sample in range(samples)]
        )
        if rng.integers(4) == 0:
            engine.cancel(rows=[(name, 0)])
        if rng.integers(2):
            engine.stream(WINDOW)
    while engine.busy:
        engine.stream(WINDOW)


def test_prompts_fill_rows():
    assert fill_prompts(192, 1, longest=127, max_prompts=8) == (127, 65)
    assert fill_prompts(128, 4, longest=200, max_prompts=8) == (128,) * 4
    assert fill_prompts(256, 2, longest=191, max_prompts=4) == (191, 65) * 2
    assert (
        fill_prompts(128, 8, longest=127, max_prompts=8) == (127,) * 8
    )  # each prompt in a row of its own
    assert fill_prompts(128, 8, longest=127, max_prompts=3) == (127,) * 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_requests_find_their_programs(small, layout):
    mesh = Asked(GREEDY, layout).mesh
    engine = Engine(
        MeshBackend(Decoder(CONFIG, mesh, PAD, STOPS, top_logprobs=K), mesh),
        slots=SLOTS * mesh.size(mesh.dp),
        max_length=COLUMNS,
        key=jax.random.key(0),
        policy=replace(SERVING, prefill_tokens=32, min_prefix=9),
    )
    engine.load(weights(), 0)
    assert engine.prefill_sizes == [
        *[(width, 1) for width in (4, 8, 12, 16, 20, 24)],
        *[(8, 4), (16, 2), (30, 1)],
    ]
    assert engine.cache_sizes == [16, 24, 30] and engine.step_sizes == [1, 8]
    before, numbers = COMPILED.copy(), count()
    made = WarmUp(engine, lambda: next(numbers), 3, COLUMNS - 1, WINDOW)
    every = made.num_left
    made.compile_common()
    common = since(before)
    # Rows of seven sizes for short prompts; one size of the cache.
    assert common == dict(zip(KINDS, (7, 7, 1, 2, 0, 2, 1, 0, 0, 0), strict=True))
    assert 0 < made.num_left < every
    rng = np.random.default_rng(0)
    serve(engine, numbers, rng, longest=8, number=40, max_prompts=2)
    assert since(before) == common, "a short request waited for a compiler"
    while made.num_left:
        made.compile_next()
    # A program for each size of the rows; for each number of their tokens, which is 4 to 24, 32 and
    # 30, and each size of the cache, but that 30 come into the widest alone; and for each size of
    # the step and of the cache. Copies are made in each size of the cache.
    everything = common | {
        "run_packed": 9,
        "copy_to_cache": 7 + 7 + 8,
        # Those that sample are there with adjustments of the logits and without.
        "admit_prefilled": 2,
        "advance": 2 * 2 * 3,
        "admit": 2 * 3,
        # Prompts that begin with the tokens of other rows, which are longer than a short prompt.
        "extend": 3,
        "copy_row": 3,
        "admit_cached": 1,
    }
    assert since(before) == everything
    longest, most = COLUMNS - 6, 2 * SLOTS
    serve(engine, numbers, rng, longest=longest, number=60, max_prompts=most, adjusts=True)
    assert since(before) == everything, "a request waited for a compiler"


@pytest.mark.slow
def test_requests_of_two_sides_find_their_programs(small, monkeypatch):
    """If each prompt has a row of its own."""
    for module in (scheduler, sizes):
        monkeypatch.setattr(module, "MIN_PREFILL_WIDTH", 4)
    monkeypatch.setattr(sizes, "MIN_STREAM_CACHE_LENGTH", 8)
    slots, columns = 2, 12
    mesh = fold_split(Split("dp1", "ep1"), jax.devices()[:2])
    decoder = Decoder(CONFIG, mesh.attention, PAD, STOPS)
    backend = SplitBackend(decoder, mesh.attention, DeviceSplit(mesh, 1), restarts=False)
    policy = replace(SERVING, prefill_tokens=8)
    engine = Engine(backend, slots=slots, max_length=columns, key=jax.random.key(0), policy=policy)
    engine.load(weights(), 0)
    assert engine.prefill_sizes == [(4, 1), (4, 2), (8, 1), (12, 1)]
    assert engine.cache_sizes == [8, 12] and engine.step_sizes == [2]
    numbers, rng = count(), np.random.default_rng(0)
    made = WarmUp(engine, lambda: next(numbers), 3, columns - 1, WINDOW)
    made.compile_common()
    common = COMPILED.total()
    serve(engine, numbers, rng, longest=4, number=10, max_prompts=2)
    assert COMPILED.total() == common, "a short request waited for a compiler"
    while made.num_left:
        made.compile_next()
    everything = COMPILED.total()
    assert everything > common
    serve(engine, numbers, rng, longest=columns - 4, number=30, max_prompts=2 * slots)
    assert COMPILED.total() == everything, "a request waited for a compiler"
