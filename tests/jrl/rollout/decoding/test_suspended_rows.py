"""Rows that are taken out of their slots and go on later, under other weights."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from policies import EOS, PROMPT, SAMPLING, Asked, answers, weights

from jrl.rollout.collection.collect import batch_from_host, batch_of
from jrl.rollout.decoding.requests import move_to_host

PAD = 0
ASKED = Asked(slots=4, seed=2)
"""With this seed rows are some tokens long when the first of them ends."""


def other_weights():
    return jax.tree.map(lambda x: x * 1.1, weights())


def interrupted(asked, again, keep_pool=False):
    """Answers of an engine that hands its rows back once, after its first poll, and what had been
    sampled by then of the rows that it handed back."""
    engine = asked.engine()
    engine.submit(asked.requests, asked.sampling)
    done = {(t.request.prompt, t.request.sample): t for t in engine.poll()}
    suspended = engine.suspend(keep_pool)
    assert engine.num_idle == engine.slots and engine.poll() == []
    pool, prefilled = engine.take_pool() if keep_pool else None, engine.usage.prefilled
    engine.release()
    engine.load(again, 6)
    if keep_pool:
        engine.give_pool(pool)
    engine.submit(suspended, asked.sampling)
    while trajectories := engine.poll():
        done |= {(t.request.prompt, t.request.sample): t for t in trajectories}
    # With a pool that is kept, only rows that were not begun are run.
    fresh = {
        request.prompt: len(request.tokens) for request in suspended if not request.has_response
    }
    begun = sum(len(request.ids) for request in suspended if request.has_response)
    run = engine.usage.prefilled - prefilled
    assert run == sum(fresh.values()) + (0 if keep_pool else begun)
    before = {
        (request.prompt, request.sample): request.sampled
        for request in suspended
        if request.sampled is not None
    }
    return done, before


@pytest.mark.slow
@pytest.mark.parametrize("records_choices", [True, False])
def test_rows_go_on_where_they_stood(records_choices):
    asked = replace(ASKED, records_choices=records_choices)
    engine = asked.engine()
    expected = {
        (t.request.prompt, t.request.sample): t for t in answers(engine, asked.requests, SAMPLING)
    }
    done, before = interrupted(asked, weights())
    assert done.keys() == expected.keys() and len(before) > 1
    for number, trajectory in done.items():
        whole = expected[number]
        np.testing.assert_array_equal(trajectory.tokens, whole.tokens)
        assert trajectory.finish == whole.finish
        length = len(before[number].tokens) if number in before else 0
        for name in ("behaviour_logprobs", "old_logprobs"):
            found, wanted = getattr(trajectory, name), getattr(whole, name)
            np.testing.assert_array_equal(found[:length], wanted[:length])
            # A cache that prefill makes equals the cache of single steps but for rounding.
            np.testing.assert_allclose(found, wanted, atol=2e-6)
        was = 5 if number not in before and trajectory.versions[0] == 5 else 6
        np.testing.assert_array_equal(trajectory.versions[:length], 5)
        np.testing.assert_array_equal(trajectory.versions[length:], was)
    rows = [expected[key] for key in sorted(expected)], [done[key] for key in sorted(done)]
    everything = np.ones(len(done), bool)
    wanted, found = (
        jax.device_get(batch_of(each, everything, asked.mesh, PROMPT, asked.response))
        for each in rows
    )
    np.testing.assert_array_equal(found.mask, wanted.mask)
    assert (found.choices is None) == (not records_choices)
    if records_choices:
        np.testing.assert_array_equal(found.choices, wanted.choices)


@pytest.mark.slow
def test_the_weights_of_the_moment_go_on():
    """What is sampled after a push is of the new weights, over a cache of the new weights."""
    asked = ASKED
    done, before = interrupted(asked, other_weights())
    engine = asked.engine()
    engine.load(other_weights(), 6)
    changed = []
    for number, earlier in before.items():
        length = len(earlier.tokens)
        request = next(r for r in asked.requests if (r.prompt, r.sample) == number)
        head = done[number].tokens[:length]
        (whole,) = answers(engine, [request._replace(response=head)], SAMPLING)
        np.testing.assert_array_equal(done[number].tokens[length:], whole.tokens)
        np.testing.assert_allclose(
            done[number].old_logprobs[length:], whole.old_logprobs, atol=2e-6
        )
        # Tokens sampled before keep the experts of their time; the last token before the push was
        # not run then.
        (moved,) = move_to_host([done[number]])
        run = len(request.tokens) + length - 1
        np.testing.assert_array_equal(moved.sampled.choices[:run], earlier.choices[:run])
        (anew,) = move_to_host([whole])
        np.testing.assert_array_equal(moved.sampled.choices[run:], anew.sampled.choices[run:])
        changed.append((moved.sampled.choices[:run] != anew.sampled.choices[:run]).any())
    assert any(changed)


@pytest.mark.slow
def test_a_cache_that_is_kept():
    """The same weights change no bit; others read what the first ones wrote."""
    asked = ASKED
    engine = asked.engine()
    expected = {
        (t.request.prompt, t.request.sample): t for t in answers(engine, asked.requests, SAMPLING)
    }
    done, before = interrupted(asked, weights(), keep_pool=True)
    assert len(before) > 1
    for number in expected:
        np.testing.assert_array_equal(done[number].tokens, expected[number].tokens)
        found, wanted = done[number].old_logprobs, expected[number].old_logprobs
        np.testing.assert_array_equal(found, wanted)
    stale, _ = interrupted(asked, other_weights(), keep_pool=True)
    rebuilt, _ = interrupted(asked, other_weights())
    differences = []
    for number, earlier in before.items():
        length = len(earlier.tokens)
        versions = stale[number].versions
        np.testing.assert_array_equal(versions, np.where(np.arange(len(versions)) < length, 5, 6))
        first = stale[number].old_logprobs[length] - rebuilt[number].old_logprobs[length]
        differences.append(abs(first))
    assert max(differences) > 1e-3


@pytest.mark.slow
def test_a_batch_from_the_host_is_that_of_the_mesh():
    asked = ASKED
    given = answers(asked.engine(), asked.requests, SAMPLING)
    counts = np.arange(len(given)) % 3 > 0
    expected = jax.device_get(batch_of(given, counts, asked.mesh, PROMPT, asked.response))
    moved = move_to_host(given)
    for there, here in zip(given, moved, strict=True):
        np.testing.assert_array_equal(here.response, there.response)
        np.testing.assert_array_equal(here.versions, there.versions)
    config = asked.config
    found = batch_from_host(
        moved, counts, asked.mesh, PROMPT, asked.response, PAD, config.num_experts
    )
    assert EOS in np.asarray(found.tokens)
    chex.assert_trees_all_equal(found, expected, strict=True)
