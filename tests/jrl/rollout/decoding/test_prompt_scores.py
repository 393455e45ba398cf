"""A server's log-probabilities of a prompt equal the trainer's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from policies import COLUMNS, CONFIG, FAST_COMPILE, PAD, STOPS, Asked, weights
from tiers import full_but

from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.packed_prompts import score_packed
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import GREEDY
from jrl.trainer.scoring import PromptLayout, Scorer, mark_replicated
from moe.config import Model
from moe.placement import specs

K, CLOSE = 3, 1e-5
"""Top tokens, and float32: the same sums, in blocks of other sizes."""
LENGTHS = (5, 1, 20, 2, 13)


def engine(layout: str = "dp1", **changed) -> Engine:
    config, mesh = replace(CONFIG, **changed), Asked(GREEDY, layout).mesh
    decoder = Decoder(config, mesh, PAD, STOPS, top_logprobs=K)
    one_mesh = MeshBackend(decoder, mesh)
    made = Engine(one_mesh, slots=4, max_length=COLUMNS, key=jax.random.key(0), policy=SERVING)
    made.load(weights(config), 0)
    return made


def prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(3, CONFIG.vocab_size, n).astype(np.int32) for n in LENGTHS]


def trainer_logprobs() -> list[np.ndarray]:
    """Of each prompt from its second token on, each in a row of its own."""
    mesh, width = Asked(GREEDY).mesh, max(LENGTHS)
    tokens = np.zeros((len(LENGTHS), width), np.int32)
    valid = np.zeros_like(tokens, bool)
    for row, ids in enumerate(prompts()):
        tokens[row, : len(ids)], valid[row, : len(ids)] = ids, True

    def local(weights, tokens, valid):
        # All but the first token are a response.
        scorer = Scorer(CONFIG, mesh, PromptLayout(1, 1))
        return mark_replicated(scorer.score(weights, tokens, valid).logprobs, mesh)

    rows = P(mesh.dp)
    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh.mesh, in_specs=(specs(Model(CONFIG, mesh)), rows, rows), out_specs=rows
        ),
        compiler_options=FAST_COMPILE,
    )
    scores = np.asarray(step(weights(), jnp.asarray(tokens), jnp.asarray(valid)))
    return [scores[row, 1:length] for row, length in enumerate(LENGTHS)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "tp2 dp2 / ep2"], "dp1"))
def test_prompts_are_scored_as_the_trainer_scores_them(layout):
    made = engine(layout)
    found = made.score(prompts(), needs_top_tokens=True)
    num_same = 0
    for scores, theirs, ids in zip(found, trainer_logprobs(), prompts(), strict=True):
        np.testing.assert_allclose(scores.logprobs, theirs, atol=CLOSE)
        assert scores.top_tokens is not None
        of_best = scores.top_tokens.logprobs
        assert of_best.shape == (len(ids) - 1, K) and np.all(np.diff(of_best) <= 0)
        # Where the token itself is among the likeliest, it has the same log-probability.
        same = scores.top_tokens.tokens == ids[1:, None]
        num_same += same.sum()
        np.testing.assert_allclose(of_best[same], theirs[same.any(1)], atol=CLOSE)
        assert np.all(theirs[~same.any(1)] <= of_best[~same.any(1), -1] + CLOSE)
        position, rank = np.nonzero(same)
        np.testing.assert_array_equal(scores.ranks[position], rank + 1)
        assert np.all(scores.ranks[~same.any(1)] > K)
    assert num_same > 5
    plain = made.score(prompts()[:2])
    assert plain[0].top_tokens is None and plain[1].logprobs.shape == (0,)
    np.testing.assert_allclose(plain[0].logprobs, found[0].logprobs, atol=CLOSE)


@pytest.mark.slow
def test_prompts_that_find_no_room_at_their_experts_are_scored_again(monkeypatch):
    attempts = []

    def first_in_vain(*given):
        scores, overflow = score_packed(*given)
        attempts.append(scores)
        if len(attempts) > 1:
            return scores, overflow
        return jax.tree.map(jnp.zeros_like, scores), jnp.int32(1)

    monkeypatch.setattr(mesh_backend, "score_packed", first_in_vain)
    (scores, *_) = engine().score(prompts())
    np.testing.assert_allclose(scores.logprobs, trainer_logprobs()[0], atol=CLOSE)
    assert len(attempts) == 2
