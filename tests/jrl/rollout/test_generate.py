"""Decoding: what a rollout holds, when it stops, and that neither mesh nor copies are in it."""

import re

import jax
import numpy as np
import pytest
from policies import COPIES, EOS, NUM_PROMPTS, PAD, PROMPT, compiled, decode, decoder_of, prompts
from policies import weights as policy_weights

from jrl.rollout import generate as module
from jrl.rollout.generate import generate
from jrl.rollout.sampling import GREEDY, Sampling

ROWS = NUM_PROMPTS * COPIES


def lengths(rollout):
    return rollout.mask.sum(axis=1)


def test_rows_of_a_group_share_their_prompt():
    rollout = decode(decoder_of(Sampling()))
    tokens, valid = (np.repeat(np.asarray(x), COPIES, axis=0) for x in prompts())
    assert rollout.tokens.shape == rollout.mask.shape == (ROWS, PROMPT + 7)
    np.testing.assert_array_equal(rollout.tokens[:, :PROMPT], tokens)
    np.testing.assert_array_equal(rollout.valid[:, :PROMPT], valid)
    assert not rollout.mask[:, :PROMPT].any()
    np.testing.assert_array_equal(rollout.valid[:, PROMPT:], rollout.mask[:, PROMPT:])
    # They differ in what follows.
    responses = rollout.tokens[:, PROMPT:].reshape(NUM_PROMPTS, COPIES, -1)
    assert all(len({tuple(row) for row in group}) > 1 for group in responses.tolist())


@pytest.mark.parametrize("seed", [0, 1])
def test_a_response_ends_with_eos_or_is_truncated(seed):
    rollout = decode(decoder_of(Sampling()), seed)
    assert 0 < rollout.truncated.sum() < ROWS, "the seed shows one of the two cases only"
    for row in range(ROWS):
        response, length = rollout.tokens[row, PROMPT:].tolist(), int(lengths(rollout)[row])
        mask = rollout.mask[row, PROMPT:].tolist()
        assert mask == [True] * length + [False] * (7 - length)
        assert EOS not in response[: length - 1]
        assert response[length:] == [PAD] * (7 - length)
        assert rollout.truncated[row] == (response[length - 1] != EOS)
        assert length == 7 or not rollout.truncated[row]
        for name in ("behaviour_logprobs", "old_logprobs"):
            logprobs = getattr(rollout, name)[row]
            assert np.all(logprobs[~rollout.mask[row]] == 0)
            assert np.all(logprobs[rollout.mask[row]] < 0)


def test_each_of_several_ends_ends_a_response():
    """Where rows may end with two tokens in place of one, they are the same up to the first."""
    one, other = decode(decoder_of(Sampling())), (EOS, 5)
    both = decode(decoder_of(Sampling(), eos=other))
    seen = set()
    for row in range(ROWS):
        response, length = both.tokens[row, PROMPT:].tolist(), int(lengths(both)[row])
        assert response[:length] == one.tokens[row, PROMPT : PROMPT + length].tolist()
        assert not set(response[: length - 1]) & set(other)
        assert response[length:] == [PAD] * (7 - length)
        assert both.truncated[row] == (response[length - 1] not in other)
        np.testing.assert_array_equal(
            both.behaviour_logprobs[row, : PROMPT + length],
            one.behaviour_logprobs[row, : PROMPT + length],
        )
        seen.add(response[length - 1])
    assert seen >= set(other), "the seed shows one of the two ends only"


def test_keys_decide():
    decoder = decoder_of(Sampling())
    assert not np.array_equal(decode(decoder, 0).tokens, decode(decoder, 1).tokens)


def test_the_mesh_is_invisible():
    one, folded = (decode(decoder_of(Sampling(), name)) for name in ("dp1", "tp2 dp2 / ep4"))
    for name in ("tokens", "valid", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(folded, name), getattr(one, name))
    # Sums over devices come in another order: a few units in the sixth digit.
    np.testing.assert_allclose(folded.behaviour_logprobs, one.behaviour_logprobs, atol=1e-5)


def test_greedy_rows_of_a_group_are_equal():
    rollout = decode(decoder_of(GREEDY))
    groups = rollout.tokens.reshape(NUM_PROMPTS, COPIES, -1)
    np.testing.assert_array_equal(groups, np.repeat(groups[:, :1], COPIES, axis=1))
    np.testing.assert_array_equal(rollout.behaviour_logprobs, 0)
    assert np.all(rollout.old_logprobs[rollout.mask] < 0)


@pytest.mark.slow
def test_stopping_early_changes_nothing(monkeypatch):
    """All rows end before the limit. With an end that never comes, what precedes it is the same."""
    steps = []
    drawn = module.draw

    def counted(logits, sampling, keys):
        jax.debug.callback(lambda: steps.append(1))
        return drawn(logits, sampling, keys)

    # Hot, so that the end comes to every row.
    response, hot = 50, Sampling(temperature=3.0)
    with monkeypatch.context() as patched:
        patched.setattr(module, "draw", counted)
        stopped = decode(decoder_of(hot, response=response))
    jax.effects_barrier()
    assert not stopped.truncated.any()
    assert len(steps) == lengths(stopped).max() < response

    endless = decode(decoder_of(hot, response=response, eos=99))
    assert endless.truncated.all()
    assert endless.mask[:, PROMPT:].all()
    np.testing.assert_array_equal(endless.tokens[stopped.valid], stopped.tokens[stopped.valid])
    # Rows that have ended no longer reach the experts, so the others are grouped in other blocks.
    np.testing.assert_allclose(
        endless.behaviour_logprobs[stopped.mask],
        stopped.behaviour_logprobs[stopped.mask],
        atol=1e-5,
    )


def test_a_response_of_one_token():
    longer, single = (decode(decoder_of(Sampling(), response=n)) for n in (7, 1))
    assert single.tokens.shape == (ROWS, PROMPT + 1)
    np.testing.assert_array_equal(single.tokens, longer.tokens[:, : PROMPT + 1])
    assert single.mask[:, PROMPT].all()
    np.testing.assert_array_equal(single.truncated, single.tokens[:, PROMPT] != EOS)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp8", r"4 prompts x 3 completions = 12 rows cannot be decoded .* divide by dp=8"),
        ("tp4 dp2 / ep4", r"12 rows cannot be decoded on layout tp4 .* rows per rank by tp=4"),
        ("tp2 dp4 / ep4", r"12 rows cannot be decoded on layout tp2 .* rows per rank by tp=2"),
    ],
)
def test_batches_that_do_not_divide(layout, message):
    with pytest.raises(ValueError, match=message):
        generate(decoder_of(Sampling(), layout), policy_weights(), *prompts(), jax.random.key(0))


def computations(hlo):
    """The instructions of each computation of an HLO module."""
    found, lines = {}, None
    for line in hlo.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            lines = found.setdefault(start[1], [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def large_copies_in_loops(hlo, num_elements):
    """Copies of arrays of at least that size, in the bodies of loops and in what they call."""
    parts = computations(hlo)
    pending = re.findall(r" while\(.*body=%?([\w.-]+)", hlo)
    assert pending, "no loop in the program"
    reached = set()
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        for line in parts[name]:
            pending += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", line)
            for several in re.findall(r"(?:calls|branch_computations)=\{([^}]*)\}", line):
                pending += re.findall(r"%?([\w.-]+)", several)
    copies = []
    for name in reached:
        for line in parts[name]:
            made = re.search(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", line)
            if made and np.prod([int(n) for n in made[1].split(",") if n]) >= num_elements:
                copies.append(line.strip())
    return copies


RESPONSE = 60
# Of one layer's keys. The weights and all else that a step touches are smaller.
CACHE_ELEMENTS = ROWS * (PROMPT + RESPONSE - 1) * 2 * 6


def test_the_cache_is_not_copied_per_token():
    program = compiled(decoder_of(Sampling(), response=RESPONSE))
    assert large_copies_in_loops(program.as_text(), CACHE_ELEMENTS) == []


@pytest.mark.slow
def test_a_step_that_keeps_the_old_cache_is_seen_to_copy_it(monkeypatch):
    step = module.decode_step

    def keeps_the_old(layers, weights, cache, *rest):
        logits, new = step(layers, weights, cache, *rest)
        # Which of the old keys is read depends on the new ones, so both must exist at once.
        column = jax.numpy.argmax(logits[0])
        return logits + jax.numpy.sum(cache.keys[0][:, column]) * 1e-9, new

    monkeypatch.setattr(module, "decode_step", keeps_the_old)
    # Another limit: a program that was traced before is not traced again.
    program = compiled(decoder_of(Sampling(), response=RESPONSE + 1))
    assert large_copies_in_loops(program.as_text(), CACHE_ELEMENTS)
