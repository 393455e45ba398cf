"""Requests that begin with tokens of other rows: the same samples as if all tokens are run."""

from collections import deque
from dataclasses import replace

import jax
import numpy as np
import pytest
from policies import CONFIG, PAD, Asked, weights

from jrl.rollout.decoding import extension
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling import sizes
from jrl.rollout.decoding.scheduling.prefix_cache import PrefixCache
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import GREEDY, RequestSampling
from moe.architecture.attention import MultiHeadLatentAttention

SLOTS, COLUMNS = 4, 64
NETWORKS = {
    "gqa": CONFIG,
    "windows": replace(CONFIG, num_layers=2, sliding_window=5),
    "latent": replace(CONFIG, num_kv_heads=4, mla=MultiHeadLatentAttention(6, None, 4, 6)),
    "scanned": replace(CONFIG, num_layers=3, execution=replace(CONFIG.execution, scan_layers=True)),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Pieces of four tokens, so that an extension has more than one."""
    monkeypatch.setattr(extension, "CHUNK", 4)


def engine(min_prefix, layout="dp1", config=CONFIG, slots=SLOTS):
    mesh = Asked(GREEDY, layout).mesh
    backend = MeshBackend(Decoder(config, mesh, PAD, (2,)), mesh)
    policy = replace(SERVING, min_prefix=min_prefix)
    key = jax.random.key(0)
    made = Engine(backend, slots=slots, max_length=COLUMNS, key=key, policy=policy)
    made.load(weights(config), 0)
    return made


def tokens(seed, count):
    return np.random.default_rng(seed).integers(3, CONFIG.vocab_size, count).astype(np.int32)


def request(number, ids, limit=5, sample=0, temperature=1.0):
    return Request(number, sample, ids, limit, sampling=RequestSampling(temperature, 1.0, 7))


def run(made, requests):
    """Tokens, log-probabilities and cached tokens of each request, by prompt and sample."""
    made.submit(requests)
    rows = {}
    while made.busy:
        for chunk in made.stream(3):
            key = chunk.request.prompt, chunk.request.sample
            ids, logprobs, _ = rows.get(key, ([], [], 0))
            rows[key] = ids + chunk.tokens.tolist(), logprobs + chunk.logprobs.tolist(), 0
            rows[key] = *rows[key][:2], chunk.num_cached
    return rows


def converse(made, turns=4):
    """Turns of a conversation: each begins with the turn before and what was sampled."""
    ids, all_rows = tokens(0, 6), []
    for turn in range(turns):
        all_rows.append(run(made, [request(turn, ids)])[turn, 0])
        ids = np.concatenate([ids, all_rows[-1][0], tokens(turn + 1, 6)]).astype(np.int32)
    return all_rows


def assert_same_rows(cached, whole):
    for (ids, logprobs, _), (expected, expected_logprobs, _) in zip(cached, whole, strict=True):
        assert ids == expected
        # Sums over the same columns in another order, in float32.
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-5)


def test_conversation_runs_new_tokens_only():
    cached, whole = engine(min_prefix=2), engine(min_prefix=None)
    rows, expected = converse(cached), converse(whole)
    assert_same_rows(rows, expected)
    lengths = [6 + sum(len(row[0]) + 6 for row in rows[:turn]) for turn in range(4)]
    # The last sampled token of a turn was not run.
    known = [0, *(n + len(row[0]) - 1 for n, row in zip(lengths, rows, strict=False))][:4]
    assert [row[2] for row in rows] == known
    assert cached.usage.prefilled == sum(lengths) - sum(known)
    assert whole.usage.prefilled == sum(lengths)
    assert cached.usage.row_steps + cached.usage.admitted == sum(len(row[0]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2 / ep2", "tp2 dp2 / ep4"])
def test_conversation_has_same_samples_on_layouts(layout):
    assert_same_rows(converse(engine(2, layout), 3), converse(engine(None, layout), 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_conversation_has_same_samples_with_networks(name):
    config = NETWORKS[name]
    assert_same_rows(
        converse(engine(2, config=config), 3), converse(engine(None, config=config), 3)
    )


def test_branches_copy_the_row_in_flight():
    prompt, made = tokens(0, 12), engine(2)
    made.submit([request(0, prompt, 9)])
    chunks = made.stream(2)
    asked = [request(n, np.concatenate([prompt, tokens(n, n)]).astype(np.int32)) for n in (1, 2)]
    rows = run(made, asked)
    first = [t for chunk in chunks for t in chunk.tokens.tolist()] + rows.pop((0, 0))[0]
    whole = engine(None)
    assert first == run(whole, [request(0, prompt, 9)])[0, 0][0]
    for n in (1, 2):
        assert rows[n, 0][0] == run(whole, asked[n - 1 : n])[n, 0][0]
        assert rows[n, 0][2] == 12


def test_samples_of_a_cached_prompt_are_different_samples():
    prompt = tokens(0, 12)
    asked = [request(1, prompt, 6, sample) for sample in range(SLOTS)]
    made, whole = engine(2), engine(None)
    run(made, [request(0, prompt)])
    rows, expected = run(made, asked), run(whole, asked)
    assert {key: row[0] for key, row in rows.items()} == {k: row[0] for k, row in expected.items()}
    assert len({tuple(row[0]) for row in rows.values()}) > 1
    assert {row[2] for row in rows.values()} == {11}


def test_weights_clear_the_prefix_cache():
    made, prompt = engine(2), tokens(0, 12)
    run(made, [request(0, prompt)])
    made.load(jax.tree.map(lambda x: 2 * x, weights()), 1)
    rows = run(made, [request(1, prompt)])
    assert rows[1, 0][2] == 0


def test_cache_keeps_columns_of_an_ended_row(monkeypatch):
    monkeypatch.setattr(sizes, "MIN_STREAM_CACHE_LENGTH", 8)
    monkeypatch.setattr("jrl.rollout.decoding.scheduling.cache_size.STEPS_BEFORE_SHRINK", 1)
    made, prompt = engine(2), tokens(0, 30)
    run(made, [request(0, prompt)])
    run(made, [request(1, tokens(1, 3), temperature=0.0)])
    row = run(made, [request(2, prompt)])[2, 0]
    assert row[2] == 29
    assert row[0] == run(engine(None), [request(2, prompt)])[2, 0][0]


def plan(rows, free, *requests, min_tokens=3, per_rank=4):
    cache = PrefixCache(min_tokens, per_rank)
    for slot, ids in rows.items():
        cache.put(slot, np.array(ids, np.int32))
    asked = [request(n, np.array(ids, np.int32)) for n, ids in enumerate(requests)]
    slots = [deque(each) for each in free]
    extensions, others = cache.plan(asked, slots)
    taken = [(e.request.prompt, e.slot, e.source, e.num_cached) for e in extensions]
    return taken, [other.prompt for other in others]


LONG = [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "free", "asked", "taken"),
    [
        # An ended row is continued in its slot.
        ({2: LONG}, [[0, 2]], [*LONG, 8, 9], [(0, 2, 2, 4)]),
        # The last token of a row was not run; the request's own last is left for a step.
        ({2: LONG}, [[2]], LONG, [(0, 2, 2, 4)]),
        # Another continuation of its beginning leaves it in its slot.
        ({2: LONG}, [[0, 2]], [3, 4, 5, 9, 9], [(0, 0, 2, 3)]),
        # So does a row in flight.
        ({2: LONG}, [[0, 1]], [*LONG, 8], [(0, 0, 2, 4)]),
        # The longest is taken.
        ({1: LONG[:4], 2: LONG}, [[0, 1, 2]], [*LONG, 8], [(0, 2, 2, 4)]),
        # Too few tokens, too many new ones, and no free slot of its rank.
        ({2: LONG}, [[0, 2]], [3, 4, 9, 9], []),
        ({2: LONG}, [[0, 2]], [*LONG, *range(20)], []),
        ({2: LONG}, [[], [5]], [*LONG, 8], []),
    ],
)
def test_plan_of_extensions(rows, free, asked, taken):
    extensions, others = plan(rows, free, asked)
    assert extensions == taken
    assert others == ([] if taken else [0])


def test_plan_continues_what_it_planned():
    extensions, others = plan({2: LONG}, [[0, 1, 2]], [*LONG, 8], [*LONG, 8], [9, 9, 9, 9, 9])
    assert extensions == [(0, 2, 2, 4), (1, 0, 2, 5)]
    assert others == [2]
