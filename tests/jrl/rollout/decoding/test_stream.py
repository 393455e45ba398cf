"""Rows written a few tokens at a time, each drawn as its request asks: the tokens equal the
tokens of an engine that draws all rows alike, and nothing else that runs has a say in them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import COLUMNS, CONFIG, COPIES, PAD, PROMPT, STOPS, Asked, decode, prompts, weights
from tiers import full_but

from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.packed_prompts import run_packed
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling import cache_size, sizes
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import (
    GREEDY,
    RequestSampling,
    RowSampling,
    Sampling,
    sample_rows,
    sample_tokens,
)

RESPONSE, SLOTS, K = 7, 4, 3
GREEDILY = RequestSampling(temperature=0.0, needs_top_tokens=True)


def engine(layout: str = "dp1", slots: int = SLOTS, columns: int = COLUMNS) -> Engine:
    mesh = Asked(GREEDY, layout).mesh
    decoder = Decoder(CONFIG, mesh, PAD, STOPS, top_logprobs=K)
    one_mesh = MeshBackend(decoder, mesh)
    made = Engine(one_mesh, slots=slots, max_length=columns, key=jax.random.key(0), policy=SERVING)
    made.load(weights(), 5)
    return made


def ids(number: int) -> np.ndarray:
    tokens, valid = prompts()
    return np.asarray(tokens[number][valid[number]], np.int32)


def asked(number: int, own: RequestSampling, samples: int = 1, name: int | None = None):
    """Samples of one of the prompts, which may go by another number."""
    prompt = number if name is None else name
    return [Request(prompt, s, ids(number), RESPONSE, sampling=own) for s in range(samples)]


def written(made: Engine, window: int, late: list[Request] | None = None):
    """The rows to their ends, by prompt and sample: tokens, log-probabilities, the likeliest, and
    what ended them. What comes late is asked for after the first look."""
    rows: dict = {}
    while made.busy:
        for row in made.stream(window):
            key = row.request.prompt, row.request.sample
            rows.setdefault(key, []).append(row)
            assert len(row.tokens) == len(row.logprobs) <= window + 1
        if late:
            made.submit(late)
            late = None
    return {
        key: (
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            [part.top_tokens for part in parts],
            [part.finish for part in parts],
        )
        for key, parts in rows.items()
    }


@cache
def crowd(window: int, layout: str = "dp1"):
    """Requests of several kinds, more than there are slots, some of which come late."""
    made = engine(layout)
    made.submit(asked(0, GREEDILY))
    made.submit(asked(1, RequestSampling(0.7, 0.8, seed=2**40 + 5), samples=3))
    late = [*asked(2, GREEDILY), *asked(3, RequestSampling(1.3, 1.0, seed=9), samples=2)]
    rows = written(made, window, late)
    assert made.num_live == 0 and made.num_idle == SLOTS
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "tp2 dp2 / ep2"], "dp1"))
def test_greedy_rows_are_those_of_the_engine_that_draws_all_alike(layout):
    rows = crowd(2, layout)
    plain = decode(Asked(GREEDY, layout, RESPONSE))
    for number in (0, 2):
        tokens, logprobs, likeliest, finishes = rows[number, 0]
        row = number * COPIES
        mask = plain.mask[row]
        np.testing.assert_array_equal(tokens, plain.tokens[row][mask])
        # float32: the same sums, in programs of their own.
        np.testing.assert_allclose(logprobs, plain.old_logprobs[row][mask], atol=1e-5)
        assert finishes[-1] == ("length" if plain.truncated[row] else "stop")
        assert set(finishes[:-1]) <= {None}
        best = np.concatenate([part.tokens for part in likeliest])
        np.testing.assert_array_equal(best[:, 0], tokens)
        of_best = np.concatenate([part.logprobs for part in likeliest])
        np.testing.assert_allclose(of_best[:, 0], logprobs, atol=1e-6)
        assert of_best.shape == (len(tokens), K) and np.all(np.diff(of_best) <= 0)


@pytest.mark.slow
@pytest.mark.parametrize("window", full_but([1, 5], 5))
def test_neither_windows_nor_what_else_runs_have_a_say(window):
    rows = crowd(2)
    alone = engine()
    # The same seed under another number of its prompt.
    alone.submit(asked(1, RequestSampling(0.7, 0.8, seed=2**40 + 5), samples=3, name=77))
    others = written(alone, window)
    assert len({tuple(rows[1, sample][0]) for sample in range(3)}) > 1, "the samples are equal"
    for sample in range(3):
        np.testing.assert_array_equal(others[77, sample][0], rows[1, sample][0])
        assert others[77, sample][2][0] is None, "nobody asked for the likeliest"


@pytest.mark.slow
def test_what_is_dropped_gives_its_slots_back():
    made = engine()
    made.submit(asked(1, RequestSampling(0.7, 0.8, seed=2**40 + 5), samples=3))
    made.submit(asked(0, GREEDILY, samples=3))
    made.stream(1)
    made.cancel(rows={(0, 0), (0, 2), (1, 1)})  # one sits, one waits, one sits
    assert made.num_live == 2
    rows = written(made, 3)
    assert {key for key in rows} <= {(1, 0), (1, 2), (0, 1)} and (0, 1) in rows
    assert made.num_idle == SLOTS
    tokens = rows[0, 1][0]
    np.testing.assert_array_equal(tokens, crowd(2)[0, 0][0])


@pytest.mark.slow
def test_prompts_that_find_no_room_at_their_experts_run_again(monkeypatch):
    attempts, expected = [], crowd(2)[0, 0][0]

    def first_in_vain(decoder, *given):
        ran = run_packed(decoder, *given)
        attempts.append(ran)
        if len(attempts) > 1:
            return ran
        return jax.tree.map(jnp.zeros_like, ran)._replace(overflow=jnp.int32(1))

    monkeypatch.setattr(mesh_backend, "run_packed", first_in_vain)
    made = engine()
    made.submit(asked(0, GREEDILY))
    np.testing.assert_array_equal(written(made, 2)[0, 0][0], expected)
    assert (len(attempts), made.usage.repeated) == (2, 1)


@pytest.mark.slow
def test_the_cache_is_as_wide_as_its_rows_need(monkeypatch):
    monkeypatch.setattr(sizes, "MIN_STREAM_CACHE_LENGTH", 4)
    monkeypatch.setattr(cache_size, "STEPS_BEFORE_SHRINK", 1)
    monkeypatch.setattr(sizes, "MIN_CACHE_LENGTH", 4)
    made, widths, tokens = engine(columns=PROMPT + RESPONSE), list[int](), list[int]()
    made.submit(asked(0, GREEDILY))  # one token, and at most seven more
    while made.busy:
        tokens += [token for row in made.stream(1) for token in row.tokens.tolist()]
        assert made._pool is not None
        widths.append(made._pool.cache.keys[0].shape[-1])
    assert tokens == crowd(2)[0, 0][0].tolist(), "what was there is gone"
    assert made.cache_sizes == [4, 6, 8, 12, 13] and widths[0] == 4 and widths == sorted(widths)
    made.submit(asked(2, GREEDILY))
    rows = written(made, 2)
    np.testing.assert_array_equal(rows[2, 0][0], crowd(2)[2, 0][0])
    assert made._pool is not None and made._pool.cache.keys[0].shape[-1] == 12
    made.submit([Request(9, 0, ids(0), 1, sampling=GREEDILY)])
    made.stream(1)
    assert made._pool.cache.keys[0].shape[-1] == 4, "it does not become narrow again"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "tp2 / ep2"])
def test_a_step_computes_no_more_slots_than_it_needs(monkeypatch, layout):
    made, computed, run = engine(layout, slots=16), list[list[int]](), mesh_backend.advance

    def recorded(*given):
        slots = given[-1].slots
        computed.append([] if slots is None else slots.tolist())
        return run(*given)

    monkeypatch.setattr(mesh_backend, "advance", recorded)
    assert made.step_sizes == [2, 16]
    made.submit(asked(0, GREEDILY))
    made.submit(asked(1, RequestSampling(0.7, 0.8, seed=2**40 + 5), samples=3))
    rows = written(made, 2)
    assert computed[0] == [], "four rows stand in more than two slots"
    for key in rows:
        np.testing.assert_array_equal(rows[key][0], crowd(2)[key][0])
    computed.clear()
    made.submit(asked(2, GREEDILY))
    alone = written(made, 2)
    assert {*map(len, computed)} == {2} and all(4 in some for some in computed)
    np.testing.assert_array_equal(alone[2, 0][0], crowd(2)[2, 0][0])
    best = np.concatenate([part.logprobs for part in alone[2, 0][2]])
    np.testing.assert_allclose(best[:, 0], alone[2, 0][1], atol=1e-6)


def test_a_request_says_how_it_is_drawn():
    with pytest.raises(ValueError, match=r"\(2, 0\) has no sampling settings"):
        engine().submit([Request(2, 0, ids(2), RESPONSE)])


@pytest.mark.parametrize("top_p", full_but([1.0, 0.6], 0.6))
def test_rows_that_are_alike_are_drawn_as_a_program_for_them_draws(top_p):
    rows, vocab = 5, 13
    logits = np.random.default_rng(3).normal(size=(rows, vocab)).astype(np.float32) * 2
    own = RowSampling(
        temperatures=np.full(rows, 0.7, np.float32),
        top_ps=np.full(rows, top_p, np.float32),
        seeds=np.zeros((rows, 2), np.uint32),
        needs_top_tokens=np.zeros(rows, bool),
    )

    @jax.jit
    def drawn(logits, own):
        keys = jax.random.split(jax.random.key(4), rows)
        alike = sample_tokens(logits, Sampling(0.7, top_p=top_p), keys)
        return sample_rows(logits, own, keys), alike, jax.nn.log_softmax(logits)

    (tokens, behaviour, policy), expected, whole = drawn(logits, own)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(behaviour, expected[1], atol=1e-6)
    whole = np.asarray(whole)[np.arange(rows), np.asarray(tokens)]
    np.testing.assert_allclose(policy, whole, atol=1e-6)
