"""Responses written in windows: who goes on, who begins, and that none is lost."""

import itertools

import chex
import jax
import numpy as np
import pytest
from small_runs import fresh_weights, small_recipe, small_run, small_setup

from jrl.rollout.collection.collect import collect, sampling_of

WINDOW = 2


def steps_of(setup, number, state=None, first=0):
    """What so many steps collect, one after the other, with the same weights."""
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), 0)
    if state is None:
        state = setup.recipe.init_state(setup.response_length)
    steps = []
    for _ in range(number):
        steps.append(collect(sampler, setup.recipe, setup.mesh, first, state))
        first, state = steps[-1].prompts_seen, steps[-1].state
    return steps


@pytest.fixture(scope="module")
def setup():
    return small_setup(small_recipe("tppo", window=WINDOW))


@pytest.fixture(scope="module")
def steps(setup):
    return steps_of(setup, 6)


def key(completion):
    request = completion.trajectory.request
    return request.prompt, request.sample


@pytest.mark.slow
def test_what_is_unfinished_goes_on_in_the_next_step(setup, steps):
    for before, after in itertools.pairwise(steps):
        going_on = {key(c) for c in before.completions if c.trajectory.finish == "window"}
        assert going_on <= {key(c) for c in after.completions}
        for c in after.completions:
            assert (len(c.trajectory.request.response) > 0) == (key(c) in going_on)
            assert len(c.trajectory.tokens) <= WINDOW
    assert any(len(c.trajectory.request.response) == 2 * WINDOW for c in steps[-1].completions)


@pytest.mark.slow
def test_every_response_is_written_once_from_its_first_token_to_its_last(setup, steps):
    """What stands in the steps together is what a rollout without windows gives."""
    parts = {}
    for step in steps:
        assert len(step.completions) == setup.recipe.completions
        for c in step.completions:
            np.testing.assert_array_equal(c.trajectory.request.response, parts.get(key(c), []))
            parts[key(c)] = c.trajectory.response.tolist()
    finished = {key(c) for step in steps for c in step.completions if c.verdict is not None}
    under_way = {
        (int(prompt), int(sample))
        for prompt, sample, length in zip(
            steps[-1].state["unfinished"].prompts,
            steps[-1].state["unfinished"].samples,
            steps[-1].state["unfinished"].lengths,
            strict=True,
        )
        if length >= 0
    }
    assert not finished & under_way
    group = range(setup.recipe.group_size)
    assert finished | under_way == {(n, s) for n in range(steps[-1].prompts_seen) for s in group}
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), 0)
    examples = {number: setup.task.train(number) for number in range(steps[-1].prompts_seen)}
    whole = sampler.sample(examples, sampling_of(setup.recipe), setup.recipe.group_size)
    for c in whole:
        if key(c) in finished:
            assert c.trajectory.tokens.tolist() == parts[key(c)]


@pytest.mark.slow
def test_the_batch_is_of_the_window(setup, steps):
    for step in steps[1:]:
        batch = jax.device_get(step.batch)
        for row, c in enumerate(step.completions):
            t = c.trajectory
            assert batch.mask[row].sum() == len(t.tokens)
            np.testing.assert_array_equal(batch.tokens[row][batch.mask[row]], t.tokens)
            assert batch.valid[row].sum() == len(t.request.tokens) + len(t.response)
            assert batch.finished[row] == (t.finish != "window") == (c.verdict is not None)
            assert batch.truncated[row] == (t.finish == "length")


@pytest.mark.slow
def test_in_the_first_step_rows_are_written_to_different_lengths(steps):
    lengths = {
        len(c.trajectory.tokens) for c in steps[0].completions if c.trajectory.finish == "window"
    }
    assert lengths == {WINDOW, 2 * WINDOW}


@pytest.mark.slow
def test_a_group_may_be_cut(steps):
    """Rows that a step has no room for begin in the next, in their order."""
    begun = [
        [key(c) for c in step.completions if not len(c.trajectory.request.response)]
        for step in steps
    ]
    every = [row for rows in begun for row in rows]
    assert every == sorted(set(every))
    assert any(rows and rows[-1][1] == 0 for rows in begun), "no group was cut"


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3])
def test_what_is_under_way_is_all_that_there_is_to_keep(setup, steps, at):
    before = steps[at - 1]
    again = steps_of(setup, 2, before.state, before.prompts_seen)
    for one, other in zip(again, steps[at : at + 2], strict=True):
        chex.assert_trees_all_equal(one.batch, other.batch)
        chex.assert_trees_all_equal(one.state, other.state)
        assert one.metrics == other.metrics


@pytest.mark.slow
def test_on_a_mesh():
    one, folded = (
        steps_of(small_setup(small_recipe("tppo", window=WINDOW), small_run(layout=layout)), 3)
        for layout in ("dp1", "tp2 dp2 / ep4")
    )
    for a, b in zip(one, folded, strict=True):
        np.testing.assert_array_equal(a.batch.tokens, jax.device_get(b.batch.tokens))
        chex.assert_trees_all_equal(a.state, b.state)
