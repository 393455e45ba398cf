"""Decoding slots: what a rollout holds, when it stops, and that nothing else has a say in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from policies import (
    COLUMNS,
    CONFIG,
    COPIES,
    NUM_PROMPTS,
    PAD,
    PROMPT,
    STOPS,
    Asked,
    answers,
    decode,
    prompts,
    weights,
)

from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.mesh_backend import advance
from jrl.rollout.decoding.prefill import admit
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling import sizes
from jrl.rollout.sampling import GREEDY, Sampling
from moe.cache import over_columns
from moe.config import GatedDeltaNet, Model
from moe.model import routing_choices
from moe.placement import specs
from sharding.folding import Layout, fold

ROWS = NUM_PROMPTS * COPIES
DENSE = replace(CONFIG, num_experts=0, d_ff=16)
CLOSE = 1e-5
"""float32: the same sums, in blocks of other sizes."""


def lengths(rollout):
    return rollout.mask.sum(axis=1)


@pytest.mark.slow
def test_rows_of_a_group_share_their_prompt():
    rollout = decode(Asked())
    tokens, valid = (np.repeat(np.asarray(x), COPIES, axis=0) for x in prompts())
    assert rollout.tokens.shape == rollout.mask.shape == (ROWS, PROMPT + 7)
    np.testing.assert_array_equal(rollout.tokens[:, :PROMPT][valid], tokens[valid])
    np.testing.assert_array_equal(rollout.tokens[:, :PROMPT][~valid], PAD)
    np.testing.assert_array_equal(rollout.valid[:, :PROMPT], valid)
    assert not rollout.mask[:, :PROMPT].any()
    np.testing.assert_array_equal(rollout.valid[:, PROMPT:], rollout.mask[:, PROMPT:])
    # They differ in what follows.
    responses = rollout.tokens[:, PROMPT:].reshape(NUM_PROMPTS, COPIES, -1)
    assert all(len({tuple(row) for row in group}) > 1 for group in responses.tolist())


@pytest.mark.parametrize("seed", [3, 0])
def test_a_response_ends_with_a_stop_or_is_truncated(seed):
    rollout = decode(Asked(seed=seed))
    assert 0 < rollout.truncated.sum() < ROWS, "the seed shows one of the two cases only"
    last = rollout.tokens[np.arange(ROWS), PROMPT + lengths(rollout) - 1]
    assert set(STOPS) <= set(last.tolist()), "the seed shows one of the ends only"
    for row in range(ROWS):
        response, length = rollout.tokens[row, PROMPT:].tolist(), int(lengths(rollout)[row])
        mask = rollout.mask[row, PROMPT:].tolist()
        assert mask == [True] * length + [False] * (7 - length)
        assert not set(response[: length - 1]) & set(STOPS)
        assert response[length:] == [PAD] * (7 - length)
        assert rollout.truncated[row] == (response[length - 1] not in STOPS)
        assert length == 7 or not rollout.truncated[row]
        for name in ("behaviour_logprobs", "old_logprobs"):
            logprobs = getattr(rollout, name)[row]
            assert np.all(logprobs[~rollout.mask[row]] == 0)
            assert np.all(logprobs[rollout.mask[row]] < 0)


@pytest.mark.slow
def test_ends_have_no_say_in_what_comes_before_them():
    """Where rows may end with two tokens in place of one, they are the same up to the first."""
    one, both = decode(Asked(stops=STOPS[:1])), decode(Asked())
    for row in range(ROWS):
        response, length = both.tokens[row, PROMPT:].tolist(), int(lengths(both)[row])
        assert response[:length] == one.tokens[row, PROMPT : PROMPT + length].tolist()
        np.testing.assert_allclose(
            both.behaviour_logprobs[row, : PROMPT + length],
            one.behaviour_logprobs[row, : PROMPT + length],
            atol=CLOSE,
        )
    assert one.mask.sum() > both.mask.sum()


def test_the_key_decides():
    assert not np.array_equal(decode(Asked()).tokens, decode(Asked(seed=0)).tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["tp2 dp2 / ep4", pytest.param("dp4 / ep2", marks=pytest.mark.slow)]
)
def test_the_mesh_is_invisible(layout):
    one, folded = decode(Asked()), decode(Asked(layout=layout))
    for name in ("tokens", "valid", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(folded, name), getattr(one, name))
    # Sums over devices come in another order: a few units in the sixth digit.
    np.testing.assert_allclose(folded.behaviour_logprobs, one.behaviour_logprobs, atol=CLOSE)


@pytest.mark.slow
def test_greedy_rows_of_a_group_are_equal():
    rollout = decode(Asked(GREEDY))
    groups = rollout.tokens.reshape(NUM_PROMPTS, COPIES, -1)
    np.testing.assert_array_equal(groups, np.repeat(groups[:, :1], COPIES, axis=1))
    np.testing.assert_array_equal(rollout.behaviour_logprobs, 0)
    assert np.all(rollout.old_logprobs[rollout.mask] < 0)


@pytest.mark.slow
def test_greedy_rows_are_decoded_by_the_programs_of_sampled_ones():
    plain = Asked(Sampling())
    engine, programs = plain.engine(), (admit, advance)

    def tokens_of(sampling):
        engine.scheduler.clear_prefix_cache()  # prompts run again, and are not copied
        return [t.tokens.tolist() for t in answers(engine, plain.requests, sampling)]

    groups = [tokens_of(Sampling())]
    known = [tokens_of(Sampling()), *(program.cache_size() for program in programs)]
    groups += [tokens_of(GREEDY), tokens_of(Sampling())]
    assert [groups[0], *(program.cache_size() for program in programs)] == known
    assert groups[0] == groups[2] != groups[1]
    of_prompts = [groups[1][i : i + COPIES] for i in range(0, ROWS, COPIES)]
    assert all(row == group[0] for group in of_prompts for row in group)


# Among limits of their own, rows have one of one token below.
@pytest.mark.slow
def test_a_response_of_one_token():
    longer, single = (decode(Asked(response=n)) for n in (7, 1))
    assert single.tokens.shape == (ROWS, PROMPT + 1)
    np.testing.assert_array_equal(single.tokens, longer.tokens[:, : PROMPT + 1])
    assert single.mask[:, PROMPT].all()
    ended = np.isin(single.tokens[:, PROMPT], STOPS)
    np.testing.assert_array_equal(single.truncated, ~ended)


def drawn(asked, requests, window=None):
    """Tokens and log-probabilities by request, written on until nothing is unfinished."""
    engine, found = asked.engine(), {}
    pending = [request._replace(window=window) for request in requests]
    while pending:
        given, pending = answers(engine, pending, asked.sampling), []
        for t in given:
            key = (t.request.prompt, t.request.sample)
            before = found.get(key, (np.zeros(0, np.int32), np.zeros(0, np.float32)))
            new = (t.tokens, t.behaviour_logprobs)
            found[key] = tuple(np.concatenate(x) for x in zip(before, new, strict=True))
            if t.finish == "window":
                assert len(t.tokens) == window
                pending.append(t.request._replace(response=t.response))
        # Where weights change between windows, nothing that they made may be used again.
        engine.release()
        engine.load(weights(asked.config), 5)
    return found, engine


def same(found, expected, close):
    assert found.keys() == expected.keys()
    for key, (tokens, logprobs) in expected.items():
        np.testing.assert_array_equal(found[key][0], tokens)
        np.testing.assert_allclose(found[key][1], logprobs, atol=close, rtol=0)


LONG = Asked(response=COLUMNS - PROMPT)
FEW = replace(LONG, slots=2)
"""Rows come where others end, one or two at a time: each number is a program."""


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(DENSE, marks=pytest.mark.slow)], ids=["routed", "dense"]
)
def test_the_order_of_arrival_has_no_say_in_any_bit(config):
    asked = replace(LONG, config=config, records_choices=config.num_experts > 0)
    expected, _ = drawn(asked, asked.requests)
    assert len({len(tokens) for tokens, _ in expected.values()}) > 4, "all are of one length"
    shuffled = [asked.requests[n] for n in np.random.default_rng(0).permutation(ROWS)]
    same(drawn(asked, shuffled)[0], expected, 0)


# Of other sizes, products are summed in other blocks: the tokens are the same, the last digit not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "window"),
    [
        (FEW.slots, 12),
        (5, 6),
        (ROWS, 4),
        (1, None),
    ],
)
def test_neither_slots_nor_windows_have_a_say(slots, window):
    expected, _ = drawn(LONG, LONG.requests)
    assert max(len(tokens) for tokens, _ in expected.values()) > (window or 0)
    found, _ = drawn(replace(LONG, slots=slots), LONG.requests, window)
    same(found, expected, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "tp2 dp2 / ep4"])
def test_the_fewer_are_left_the_fewer_are_computed(monkeypatch, layout):
    """If nothing else comes and nothing is taken back; the tokens are the same."""
    expected, full = drawn(LONG, LONG.requests)
    for name, value in {
        "MIN_LENGTH_TO_SHRINK": COLUMNS,
        "MIN_ACTIVE_SLOTS": 1,
        "SHRINK_FACTOR": 3,
    }.items():
        monkeypatch.setattr(sizes, name, value)
    engine, found = replace(LONG, layout=layout).engine(), {}
    engine.submit(LONG.requests, LONG.sampling)
    while done := engine.poll(draining=True):
        found |= {(t.request.prompt, t.request.sample): t for t in done}
    assert engine.step_sizes == ([2, 4, 12] if layout == "dp1" else [2, 6])
    same({key: (t.tokens, t.behaviour_logprobs) for key, t in found.items()}, expected, CLOSE)
    assert engine.usage.row_steps == full.usage.row_steps
    assert engine.usage.slot_steps < 0.8 * full.usage.slot_steps
    assert engine.usage.utilisation > full.usage.utilisation
    # Nobody says so: all are computed.
    again = replace(LONG, layout=layout).engine()
    answers(again, LONG.requests, LONG.sampling)
    assert again.usage.slot_steps == again.usage.steps * ROWS


@pytest.mark.slow
def test_a_prompt_runs_once_for_all_that_share_it():
    engine = LONG.engine()
    answers(engine, LONG.requests, LONG.sampling)
    assert engine.usage.prefilled == sum({1, 3, 5, 6})
    # Also where its samples come one after the other, as long as a slot still begins with it.
    engine = FEW.engine()
    requests = [request for request in LONG.requests if request.prompt == 3]
    requests += [request._replace(sample=COPIES + request.sample) for request in requests]
    expected, _ = drawn(LONG, LONG.requests)
    assert len(requests) > engine.slots
    for t in answers(engine, requests, LONG.sampling)[:COPIES]:
        tokens, logprobs = expected[3, t.request.sample]
        np.testing.assert_array_equal(t.tokens, tokens)
        np.testing.assert_allclose(t.behaviour_logprobs, logprobs, atol=CLOSE)
    assert engine.usage.prefilled == 6


@pytest.mark.slow
def test_rows_are_shelved_at_places_of_their_own(monkeypatch):
    """Those that stay in their slots too: the scatter is told that no two are alike."""
    engine, seen = FEW.engine(), []
    shelve = engine.backend.write_to_buffer
    monkeypatch.setattr(
        engine.backend,
        "write_to_buffer",
        lambda shelf, rows, places: (seen.append(places), shelve(shelf, rows, places))[1],
    )
    answers(engine, FEW.requests, FEW.sampling)
    assert seen and all(len(set(places.tolist())) == engine.slots for places in seen)


@pytest.mark.slow
def test_attention_reads_no_more_columns_than_the_longest_live_row_needs(monkeypatch):
    """Of a wide pool: a power of two, whatever stands after it."""
    expected, _ = drawn(LONG, LONG.requests)
    monkeypatch.setattr(sizes, "MIN_CACHE_LENGTH", 4)
    engine, read, run = replace(FEW, slots=4).engine(), list[int](), mesh_backend.advance

    def recorded(decoder, sampling, columns, policy, pool, *given):
        def spoilt(x, axis):
            beyond = np.arange(x.shape[axis]).reshape(-1, *[1] * (-1 - axis)) >= columns
            return jnp.where(beyond, jnp.nan, x)

        read.append(columns)
        pool = replace(pool, cache=over_columns(spoilt, pool.cache))
        return run(decoder, sampling, columns, policy, pool, *given)

    monkeypatch.setattr(mesh_backend, "advance", recorded)
    short = [r._replace(max_new_tokens=3) for r in LONG.requests if r.prompt < 2]
    beside = [short[0], next(r for r in LONG.requests if r.prompt == 3)]
    for requests, columns in ((beside, COLUMNS), (short, 8)):
        read.clear()
        for t in answers(engine, requests, LONG.sampling):
            tokens, _ = expected[t.request.prompt, t.request.sample]
            np.testing.assert_array_equal(t.tokens, tokens[: t.request.max_new_tokens])
        assert set(read) == {columns}
    assert max(request.limit for request in short) == 6


def test_rows_have_limits_of_their_own():
    requests = [r._replace(max_new_tokens=1 + n % 5) for n, r in enumerate(LONG.requests)]
    expected, _ = drawn(LONG, LONG.requests)
    finishes = []
    for t in answers(FEW.engine(), requests, LONG.sampling):
        tokens, _ = expected[t.request.prompt, t.request.sample]
        np.testing.assert_array_equal(t.tokens, tokens[: t.request.max_new_tokens])
        assert t.finish == ("stop" if set(t.tokens.tolist()) & set(STOPS) else "length")
        finishes.append(t.finish)
    assert set(finishes) == {"stop", "length"}


def test_what_is_cancelled_gives_its_slots_back():
    engine, short = FEW.engine(), FEW.requests[0]._replace(max_new_tokens=2)
    others = [r for r in FEW.requests if r.prompt != 0]
    engine.submit([short, *others], LONG.sampling)
    assert [t.request.prompt for t in engine.poll()] == [0]
    assert engine.num_idle == 0
    engine.cancel([1, 2, 3])
    assert engine.num_idle == 2
    assert engine.poll() == []
    (again,) = answers(engine, [short], LONG.sampling)
    assert len(again.tokens) == 2


def test_tokens_carry_the_version_of_their_weights():
    (t,) = answers(FEW.engine(), LONG.requests[:1], LONG.sampling)
    np.testing.assert_array_equal(t.versions, np.full(len(t.tokens), 5))


def test_other_sampling_waits_for_what_is_under_way():
    engine = LONG.engine()
    engine.submit(LONG.requests, LONG.sampling)
    with pytest.raises(ValueError, match="in flight: poll until none is"):
        engine.submit(LONG.requests, GREEDY)


def test_a_row_must_fit():
    request = Request(0, 0, np.ones(PROMPT, np.int32), 24)
    with pytest.raises(ValueError, match="a row of 30 tokens does not fit slots of 29"):
        LONG.engine().submit([request], LONG.sampling)


@pytest.mark.parametrize(
    ("layout", "slots", "message"),
    [
        ("tp2 dp2 / ep4", 6, "slots=6 must be a multiple of dp x tp = 4"),
        ("dp1", 0, "slots=0 must be a multiple"),
        ("pp2", 4, "pp2 .*cannot decode: .* pp must be 1"),
    ],
)
def test_layouts_and_slots_that_do_not_fit(layout, slots, message):
    with pytest.raises(ValueError, match=message):
        replace(LONG, layout=layout, slots=slots).engine()


def test_a_cache_that_the_kernel_cannot_read_is_refused_before_a_row_comes():
    execution = replace(CONFIG.execution, decode_attention="mosaic")
    half = replace(CONFIG, dtype="bfloat16", execution=execution)
    with pytest.raises(
        ValueError, match=r"'mosaic' is not supported: heads of 6 elements \(needs a"
    ):
        replace(LONG, config=half).engine()


@pytest.mark.parametrize("layout", ["dp1", pytest.param("tp2 dp2 / ep4", marks=pytest.mark.slow)])
def test_choices_are_those_of_the_whole_sequence(layout):
    """Experts are recorded for each token that was run; the last one of a row was not."""
    asked = Asked(layout=layout)
    rollout = decode(asked)
    experts = CONFIG.num_experts
    assert rollout.choices.shape == (ROWS, PROMPT + 7, 1, CONFIG.experts_per_token)
    last = np.zeros_like(rollout.valid)
    ends = rollout.valid.shape[1] - 1 - np.argmax(rollout.valid[:, ::-1], axis=1)
    last[np.arange(ROWS), ends] = True
    run = rollout.valid & ~last
    assert np.all(rollout.choices[~run] == experts)
    assert np.all(rollout.choices[run] < experts)
    expected = chosen(rollout)
    np.testing.assert_array_equal(
        np.sort(rollout.choices[run], axis=-1), np.sort(expected[run], axis=-1)
    )


def chosen(rollout):
    mesh = fold(Layout(), jax.devices()[:1])
    model = Model(CONFIG, mesh)
    step = jax.jit(
        jax.shard_map(
            lambda w, t, v: routing_choices(w, t, v, model),
            mesh=mesh.mesh,
            in_specs=(
                specs(model),
                PartitionSpec(mesh.axes),
                PartitionSpec(mesh.axes),
            ),
            out_specs=PartitionSpec(None, mesh.axes),
        )
    )
    found = step(weights(), rollout.tokens, rollout.valid)
    return np.moveaxis(np.asarray(found), 0, 2)


@pytest.mark.slow
def test_states_are_those_of_a_rows_own_tokens():
    """A slot that went on has overwritten the state of its prompt, so the prompt is run again."""
    delta = GatedDeltaNet((0,), 2, 4, key_head_dim=5, value_head_dim=3, conv_width=4)
    config = replace(DENSE, num_layers=2, delta=delta, attention_gate=True)
    few = {"response": 5, "stops": (99,), "slots": 2, "records_choices": False}
    asked = Asked(GREEDY, config=config, **few)
    requests = [request for request in asked.requests if request.prompt in (1, 3)]
    engine = asked.engine()
    given = answers(engine, requests, asked.sampling)
    for number in (1, 3):
        first, *others = (t for t in given if t.request.prompt == number)
        for other in others:
            np.testing.assert_array_equal(other.tokens, first.tokens)
            np.testing.assert_allclose(other.old_logprobs, first.old_logprobs, atol=CLOSE)
    assert engine.usage.prefilled > 3 + 6
