"""Accuracy on held-out prompts."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import fresh_state, fresh_weights, small_recipe, small_run, small_setup

from jrl.report.metrics import without_timings
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.sampler import Sampler
from jrl.tasks import Example, Task
from jrl.tasks.definition import ProceduralTask
from jrl.trainer.evaluation.evaluate import heldout_examples, heldout_metrics, pad_with_repeats
from jrl.trainer.loop import Reinforcement
from jrl.trainer.outputs import NUM_SHOWN, write_heldout_samples
from jrl.trainer.step import train_step


def evaluate(setup, weights, step, examples):
    sampler = setup.sampler()
    sampler.engine.load(weights, step)
    found = heldout_metrics(sampler, sampling_of(setup.recipe), examples)
    return without_timings(found)


def step_of(setup, state):
    """The texts that a training step samples."""
    _, done = train_step(setup.sampler(), setup.networks, state, setup.randomness)
    return [completion.text for completion in done.collected.completions]


@pytest.mark.slow
def test_evaluation_is_deterministic_and_stands_aside():
    """The same twice, whatever was sampled in between, and no part in what is sampled then."""
    setup = small_setup(small_recipe())
    state = fresh_state(setup, fresh_weights(setup))
    examples = heldout_examples(setup.task, 4)
    first = evaluate(setup, state.policy.weights, 3, examples)
    without = step_of(setup, state)
    state = fresh_state(setup, fresh_weights(setup))
    again = evaluate(setup, state.policy.weights, 3, examples)
    assert again == first
    assert step_of(setup, state) == without
    assert first.keys() == {
        "val/accuracy/sampled",
        "val/accuracy/greedy",
        "val/score/sampled",
        "val/score/greedy",
        "val/response_length/mean",
        "val/response_length/clip_ratio",
    }


@pytest.mark.slow
def test_answers_are_verified_while_the_next_are_decoded(monkeypatch):
    setup = small_setup()
    weights = fresh_weights(setup)
    calls, decode, verify = [], Sampler.decode, ProceduralTask.verify
    greedy_begun, met = threading.Event(), []

    def decoded(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            greedy_begun.set()
        return decode(*arguments)

    def verified(*arguments):
        met.append(greedy_begun.wait(30))
        return verify(*arguments)

    monkeypatch.setattr(Sampler, "decode", decoded)
    monkeypatch.setattr(ProceduralTask, "verify", verified)
    evaluate(setup, weights, 3, heldout_examples(setup.task, 4))
    assert met == [True, True]


@pytest.mark.slow
def test_evaluations_are_paired():
    """What is drawn is of the prompt alone: another step with the same weights gives the same."""
    setup = small_setup()
    weights = fresh_weights(setup)
    examples = heldout_examples(setup.task, 4)
    one, other = (evaluate(setup, weights, step, examples) for step in (0, 3))
    assert one == other


class Finite(Task):
    """A task with few held-out prompts."""

    name, heldout_size = "finite", 0
    max_prompt_length, max_response_length, characters = 3, 1, "=0123456789"

    def __init__(self, size):
        self.heldout_size = size

    def heldout(self, index):
        assert 0 <= index < self.heldout_size
        return Example(f"{index}=", "0")


@pytest.mark.parametrize("layout", ["dp1", "dp2", "tp2 dp2 / ep4"])
@pytest.mark.parametrize(("size", "expected"), [(1, 1), (5, 5), (90, 8)])
def test_no_heldout_prompt_is_left_out(layout, size, expected):
    setup = small_setup(run=small_run(layout=layout))
    object.__setattr__(setup, "task", Finite(size))
    examples = heldout_examples(setup.task, 8)
    assert [example.prompt for example in examples] == [f"{i}=" for i in range(expected)]


def test_what_fills_up_a_batch():
    one, two, three = (Example(f"{i}=", "0") for i in range(3))
    assert pad_with_repeats([one, two, three], 4) == [one, two, three, one]
    assert pad_with_repeats([one, two], 5) == [one, two, one, two, one]
    assert pad_with_repeats([one, two, three], 3) == [one, two, three]


@pytest.mark.slow
def test_what_fills_up_a_batch_does_not_count():
    """Five prompts on four devices are the five on one."""
    found = []
    for layout in ("dp1", "dp4"):
        setup = small_setup(run=small_run(layout=layout))
        weights = fresh_weights(setup)
        found.append(evaluate(setup, weights, 3, heldout_examples(setup.task, 5)))
    assert found[0]["val/score/greedy"] == found[1]["val/score/greedy"]
    assert found[0]["val/accuracy/greedy"] * 5 == round(found[0]["val/accuracy/greedy"] * 5)


def test_heldout_prompts_of_an_endless_task():
    setup = small_setup()
    assert heldout_examples(setup.task, 3) == [setup.task.heldout(i) for i in range(3)]
    trained = {setup.task.train(i).prompt for i in range(300)}
    assert trained.isdisjoint(example.prompt for example in heldout_examples(setup.task, 300))
    assert np.unique([example.prompt for example in heldout_examples(setup.task, 300)]).size > 3


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [NUM_SHOWN, NUM_SHOWN - 1])
def test_shown_completions_are_those_of_an_evaluation(evaluated, monkeypatch):
    """They are sampled only if the evaluation has fewer prompts."""
    setup = small_setup(run=small_run(eval_prompts=evaluated))
    sampler, state = setup.sampler(), fresh_state(setup, fresh_weights(setup))
    stage, sampled, sample = Reinforcement(setup, sampler), [], Sampler.sample

    def counted(self, *arguments, **options):
        sampled.append(sample(self, *arguments, **options))
        return sampled[-1]

    monkeypatch.setattr(Sampler, "sample", counted)
    stage.evaluate(state)
    assert len(stage.evaluated) == evaluated
    shown, again = [], []
    for lines, records in ((shown, stage.evaluated), (again, ())):
        appended = SimpleNamespace(append=lambda step, record, lines=lines: lines.append(record))
        write_heldout_samples(setup, sampler, state, appended, records)
    assert shown == again and len(shown) == NUM_SHOWN
    assert len(sampled) == 1 + (evaluated < NUM_SHOWN)
