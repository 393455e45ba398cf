"""Adjustments of rows against NumPy, and in the engine beside rows that have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import COLUMNS, CONFIG, PAD, STOPS, Asked, prompts, weights
from tiers import full_but

from jrl.rollout.adjustments import (
    Adjustments,
    Constraint,
    adjust_logits,
    apply_top_k_and_min_p,
    stack_adjustments,
)
from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import GREEDY, RequestSampling, row_keys, sample_rows, stack_sampling

VOCAB, RESPONSE = 70, 7
"""More tokens than fit into two words of a constraint."""


class Only(Constraint):
    """Allows a few tokens, and keeps what came."""

    def __init__(self, *steps, vocab=VOCAB):
        self.steps, self.came, self.vocab = steps, [], vocab

    def allowed(self):
        words = np.zeros(-(-self.vocab // 32), np.uint32)
        for token in self.steps[min(len(self.came), len(self.steps) - 1)]:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words

    def accept(self, tokens):
        self.came += tokens


ROWS = [
    None,
    Adjustments(presence_penalty=0.5, frequency_penalty=-0.25),
    Adjustments(repetition_penalty=1.3),
    Adjustments(biases=((3, 100.0), (69, -2.5)), frequency_penalty=2.0),
    Adjustments(constraint=Only((0, 31, 32, 69)), repetition_penalty=0.5),
    None,
]


def logits_and_tokens():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(len(ROWS), VOCAB)).astype(np.float32) * 4
    tokens = draw.integers(0, VOCAB, (len(ROWS), 40)).astype(np.int32)
    responses = np.array([3, 30, 10, 0, 20, 40], np.int32)
    lengths = np.array([40, 35, 30, 40, 20, 40], np.int32)
    return logits, tokens, responses, lengths


def on_device(rows):
    return jax.tree.map(jnp.asarray, rows)


def adjusted_logits(rows, logits, *history):
    return adjust_logits(jnp.asarray(logits), on_device(rows), *map(jnp.asarray, history))


def in_numpy(logits, adjustments, tokens, response, length):
    """The logits of one row, token by token."""
    found = logits.astype(np.float64)
    for token, value in adjustments.biases:
        found[token] += value
    for token in range(VOCAB):
        if token in tokens[:length]:
            rate = adjustments.repetition_penalty
            found[token] = found[token] / rate if found[token] > 0 else found[token] * rate
        count = list(tokens[response:length]).count(token)
        found[token] -= adjustments.frequency_penalty * count
        found[token] -= adjustments.presence_penalty * (count > 0)
        constraint = adjustments.constraint
        if constraint is not None and token not in constraint.steps[0]:
            found[token] = -np.inf
    return found


def test_logits_are_adjusted_as_their_request_says():
    logits, tokens, responses, lengths = logits_and_tokens()
    rows = stack_adjustments(dict(enumerate(ROWS)), len(ROWS), VOCAB)
    found = np.asarray(adjusted_logits(rows, logits, tokens, responses, lengths))
    for row, adjustments in enumerate(ROWS):
        if adjustments is None:
            np.testing.assert_array_equal(found[row], logits[row])
            continue
        expected = in_numpy(logits[row], adjustments, tokens[row], responses[row], lengths[row])
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)
        assert np.any(expected != logits[row])
    assert stack_adjustments({0: None}, 2, VOCAB) is None


@pytest.mark.parametrize(
    ("adjustments", "kept"),
    [
        (Adjustments(top_k=3), lambda p, rank: rank < 3),
        (Adjustments(top_k=VOCAB + 5), lambda p, rank: rank >= 0),
        (Adjustments(min_p=0.2), lambda p, rank: p >= 0.2 * p.max()),
        (Adjustments(top_k=2, min_p=0.01), lambda p, rank: (p >= 0.01 * p.max()) & (rank < 2)),
        (Adjustments(min_p=1.0), lambda p, rank: rank < 1),
    ],
)
def test_top_k_and_min_p_keep_the_likeliest(adjustments, kept):
    logits, *_ = logits_and_tokens()
    rows = stack_adjustments(dict.fromkeys(range(len(ROWS)), adjustments), len(ROWS), VOCAB)
    found = np.asarray(apply_top_k_and_min_p(jnp.asarray(logits), on_device(rows)))
    for row in range(len(ROWS)):
        probabilities = np.exp(logits[row]) / np.exp(logits[row]).sum()
        rank = np.argsort(np.argsort(-logits[row]))
        keeps = kept(probabilities, rank)
        np.testing.assert_array_equal(found[row], np.where(keeps, logits[row], -np.inf))


def test_rows_are_sampled_each_with_its_own():
    """Beside a row of another kind a row without adjustments has the token that it had."""
    logits, tokens, responses, lengths = logits_and_tokens()
    plain = RequestSampling(1.5, 0.9, seed=5)
    kinds = [plain, plain._replace(adjustments=Adjustments(top_k=1))]
    kinds += [plain._replace(temperature=0.0, adjustments=Adjustments(top_k=4, min_p=0.1))]
    requests = {row: kinds[row % 3] for row in range(len(ROWS))}
    keys = row_keys(jax.random.key(1), jnp.arange(len(ROWS)))
    sampled = []
    for asked in (requests, dict.fromkeys(requests, plain)):
        rows = stack_sampling(asked, len(ROWS), VOCAB)
        adjusted = None
        if rows.adjustments is not None:
            history = tokens, responses, lengths
            adjusted = adjusted_logits(rows.adjustments, logits, *history)
        outputs = sample_rows(jnp.asarray(logits), on_device(rows), keys, adjusted)
        sampled.append([np.asarray(x) for x in outputs])
    (found, _, old), (alone, _, _) = sampled
    np.testing.assert_array_equal(found[::3], alone[::3])
    best = logits.argmax(1)
    np.testing.assert_array_equal(found[1::3], best[1::3])
    np.testing.assert_array_equal(found[2::3], best[2::3])
    # Of the policy, whatever the row is sampled from.
    softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(old, softmax[np.arange(len(found)), found], atol=1e-5)


def engine(layout="dp1"):
    mesh = Asked(GREEDY, layout).mesh
    one_mesh = MeshBackend(Decoder(CONFIG, mesh, PAD, STOPS, top_logprobs=2), mesh)
    made = Engine(one_mesh, slots=4, max_length=COLUMNS, key=jax.random.key(0), policy=SERVING)
    made.load(weights(), 0)
    return made


def asked(number, adjustments=None, temperature=0.0):
    tokens, valid = prompts()
    own = RequestSampling(temperature, 1.0, 7, adjustments=adjustments)
    ids = np.asarray(tokens[number][valid[number]], np.int32)
    return Request(number, 0, ids, RESPONSE, sampling=own)


def written(made, *requests):
    made.submit(requests)
    rows = {}
    while made.busy:
        for chunk in made.stream(3):
            rows.setdefault(chunk.request.prompt, []).extend(chunk.tokens.tolist())
    return [rows[request.prompt] for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "tp2 dp2 / ep2"], "dp1"))
def test_rows_with_adjustments_run_beside_others(layout):
    # Programs of earlier tests in this process would be found again, and not counted.
    jax.clear_caches()
    made = engine(layout)
    plain = written(made, asked(0), asked(1, temperature=1.2), asked(2))
    before = mesh_backend.advance.cache_size()
    one = Adjustments(biases=((9, 100.0),))
    biased = written(made, asked(0), asked(1, temperature=1.2), asked(2, one))
    assert biased[:2] == plain[:2] and biased[2] == [9] * RESPONSE
    programs = mesh_backend.advance.cache_size()
    assert programs > before
    # The token of 9 is not sampled twice, as its penalty is larger than its bias.
    two = Adjustments(biases=((9, 100.0), (4, 100.0)), presence_penalty=101.0, top_k=3)
    again = written(made, asked(0), asked(1, temperature=1.2), asked(2, two))
    assert again[:2] == plain[:2] and sorted(again[2][:2]) == [4, 9]
    assert mesh_backend.advance.cache_size() == programs, "each value is compiled"
    assert written(made, asked(0), asked(1, temperature=1.2), asked(2)) == plain


@pytest.mark.slow
def test_a_constraint_decides_on_each_token():
    """Of a row that is admitted with others, and beside which others are admitted."""
    made, steps = engine(), [(7,), (3, 4), (8,), (STOPS[1],)]
    plain = written(made, asked(0), asked(1, temperature=1.2))
    only = Only(*steps, vocab=CONFIG.vocab_size)
    made.submit([asked(2, Adjustments(constraint=only)), asked(0)])
    rows, late = {}, [asked(1, temperature=1.2)]
    while made.busy:
        for chunk in made.stream(5):
            rows.setdefault(chunk.request.prompt, []).extend(chunk.tokens.tolist())
        made.submit([late.pop()] if late else [])
    assert rows[2] == only.came and len(rows[2]) == 4
    assert rows[2][0] == 7 and rows[2][1] in (3, 4) and rows[2][2:] == [8, STOPS[1]]
    assert [rows[0], rows[1]] == plain
