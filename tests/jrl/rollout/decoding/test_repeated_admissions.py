"""Admissions that run again because experts had no room for all that chose them."""

from dataclasses import replace

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from policies import CONFIG, NUM_PROMPTS, Asked, decode, weights

from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.prefill import admit
from jrl.rollout.decoding.requests import Request
from jrl.rollout.sampling import GREEDY
from moe.execution import Execution


@pytest.mark.slow
def test_prompts_that_find_no_room_at_their_experts_run_again(monkeypatch):
    tight = replace(CONFIG, execution=replace(CONFIG.execution, buffer_factor=0.01))
    factors = []

    def watched(decoder, *given):
        pool, overflow = admit(decoder, *given)
        factors.append((decoder.config.execution.buffer_factor, overflow is None))
        return pool, overflow

    monkeypatch.setattr(mesh_backend, "admit", watched)
    found = decode(Asked(config=tight))
    assert factors == [(0.01, False), (None, True)]
    chex.assert_trees_all_equal(found, decode(Asked()))


@pytest.mark.slow
def test_admissions_that_run_again_are_counted():
    # 48 tokens, with one choice each. Even routing of the 64 places is 32 of them on each of two
    # devices, where the buffers end.
    tokens = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (NUM_PROMPTS, 12))
    requests = [Request(number, 0, ids.astype(np.int32), 7) for number, ids in enumerate(tokens)]

    def repeated(factor, own_weights):
        config = replace(CONFIG, experts_per_token=1, execution=Execution(buffer_factor=factor))
        engine = Asked(config=config, layout="dp2 / ep2", records_choices=False).engine()
        counts = []
        for _ in range(2):
            # A record of its own, as every update makes one.
            engine.load(replace(own_weights), 5)
            engine.submit(requests, GREEDY)
            before = engine.usage.copy()
            for arriving in engine.scheduler.schedule():
                engine.admit(arriving)
            counts.append(engine.usage.since(before).metrics()["perf/prefill_repeated"])
            engine.suspend()
        # In a run that goes on after a kill the engine has just been made.
        assert counts[0] == counts[1]
        return counts[0]

    spread, layers = weights(), weights().layers
    # A router that says the same of all experts sends every token to the first.
    experts = replace(layers.experts, router=jnp.zeros_like(layers.experts.router))
    gathered = replace(spread, layers=replace(layers, experts=experts))
    assert repeated(1.0, gathered) == 1
    assert repeated(1.0, spread) == repeated(None, gathered) == 0


def test_rows_that_arrive_again_begin_anew(monkeypatch):
    def again(decoder, sampling, weights, pool, tokens, lengths, arrivals, draws):
        given = tokens, lengths
        pool, _ = admit(decoder, sampling, weights, pool, *given, arrivals, draws)
        assert np.any(pool.live)
        # This time their first token is their last.
        ended = replace(arrivals, limits=arrivals.lengths + 1)
        pool, _ = admit(decoder, sampling, weights, pool, *given, ended, draws)
        assert not np.any(pool.live)
        return admit(decoder, sampling, weights, pool, *given, arrivals, draws)

    expected = decode(Asked())
    monkeypatch.setattr(mesh_backend, "admit", again)
    chex.assert_trees_all_equal(decode.__wrapped__(Asked()), expected)
