"""Environments of a rollout are closed once, whichever way its conversations end."""

from collections import Counter

import pytest
from small_runs import small_recipe
from talks import Echo, Echoing, echo, talking_setup
from three_updates import random_weights

from jrl.rollout.collection.collect import collect, sampling_of


class Counted(Echo):
    """With environments that count what happens to them."""

    def __init__(self):
        self.begun, self.closed = 0, Counter()
        self.left, self.error = None, None

    def environment(self, most):
        return CountedEchoing(most, self)

    @property
    def open(self):
        """Environments that are still to be closed; none was closed twice."""
        assert set(self.closed.values()) <= {1}
        return self.begun - len(self.closed)


class CountedEchoing(Echoing):
    def __init__(self, most, counts):
        super().__init__(most)
        self.counts = counts

    def reset(self):
        self.counts.begun += 1
        self.number = self.counts.begun
        return super().reset()

    def step(self, message):
        if self.counts.left is not None:
            self.counts.left -= 1
            if self.counts.left < 0:
                raise self.counts.error
        return super().step(message)

    def close(self):
        self.counts.closed[self.number] += 1


@pytest.fixture
def talk():
    """Makes a setup with its weights, and the counts of its environments."""

    def made(recipe=None, **changes):
        counts = Counted()
        setup = talking_setup(echo(kind=lambda: counts), recipe, **changes)
        sampler = setup.sampler()
        sampler.engine.load(random_weights(setup, setup.model), 0)
        return setup, sampler, counts

    return made


@pytest.mark.parametrize("max_turns", [None, 1])
def test_a_rollout_leaves_none_open(talk, max_turns):
    """Of conversations that are over, too long, and of too many turns."""
    setup, sampler, counts = talk(max_turns=max_turns)
    collected = collect(sampler, setup.recipe, setup.mesh, 0)
    assert len(collected.completions) < counts.begun and counts.open == 0
    turns = [each.trajectory.request.conversation for each in collected.completions]
    assert any(each.turn_limit for each in turns) == (max_turns is not None)


def test_prompts_that_are_dropped(talk):
    setup, sampler, counts = talk()
    examples = {number: setup.task.train(number) for number in range(4)}
    requests = sampler.requests(examples, 2)
    sampler.engine.submit(requests, sampling_of(setup.recipe))
    (first, *_) = sampler.engine.poll()
    assert counts.open > 1
    kept = first.request.prompt
    sampler.engine.cancel([number for number in examples if number != kept])
    assert counts.open <= 1
    while sampler.engine.poll():
        pass
    assert counts.open == 0 and sampler.engine.num_idle > 0


@pytest.mark.slow
def test_a_step_of_dynamic_sampling(talk, monkeypatch):
    recipe = small_recipe("dapo")
    setup, sampler, counts = talk(recipe)
    cancel, dropped = sampler.engine.cancel, []
    monkeypatch.setattr(
        sampler.engine, "cancel", lambda prompts: dropped.append(counts.open) or cancel(prompts)
    )
    # Of these prompts more are begun than are needed.
    collect(sampler, recipe, setup.mesh, 48)
    assert dropped == [2] and counts.open == 0


@pytest.mark.parametrize("error", [RuntimeError("no answer"), KeyboardInterrupt()])
def test_a_rollout_that_ends_with_an_error_or_an_interrupt(talk, error):
    setup, sampler, counts = talk()
    examples = {number: setup.task.train(number) for number in range(4)}
    counts.left, counts.error = 6, error
    with pytest.raises(type(error)):
        sampler.sample(examples, sampling_of(setup.recipe), 2)
    assert counts.open > 1
    setup.task.close()
    setup.task.close()
    assert counts.open == 0
