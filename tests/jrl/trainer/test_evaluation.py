"""Accuracy on held-out prompts."""

import threading

import numpy as np
import pytest
from small_runs import small_recipe, small_run, small_setup

from jrl.report.metrics import without_timings
from jrl.tasks import Example
from jrl.tasks.procedural import ProceduralTask
from jrl.trainer import evaluation
from jrl.trainer.evaluation import evaluate, filled_up, heldout_examples
from jrl.trainer.loop import begin, train_step
from jrl.trainer.state import initial_weights


def test_evaluation_is_deterministic_and_stands_aside():
    """The same twice, whatever was sampled in between, and no part in what is sampled then."""
    setup = small_setup(small_recipe())
    state = begin(setup, initial_weights(setup, setup.model, "weights"))
    examples = heldout_examples(setup, 8)
    first = without_timings(evaluate(setup, state.policy.weights, 3, examples))
    _, without, _, _ = train_step(setup, state)
    state = begin(setup, initial_weights(setup, setup.model, "weights"))
    again = without_timings(evaluate(setup, state.policy.weights, 3, examples))
    assert again == first
    assert train_step(setup, state)[1].kept.texts == without.kept.texts
    assert first.keys() == {
        "val/accuracy/sampled",
        "val/accuracy/greedy",
        "val/score/sampled",
        "val/score/greedy",
        "val/response_length/mean",
        "val/response_length/clip_ratio",
    }


def test_answers_are_verified_while_the_next_are_decoded(monkeypatch):
    setup = small_setup()
    weights = initial_weights(setup, setup.model, "weights")
    decoders, decode, verify = [], evaluation.decode, ProceduralTask.verify
    greedy_begun, met = threading.Event(), []

    def decoded(setup, decoder, *arguments):
        decoders.append(decoder)
        if len(decoders) == 2:
            greedy_begun.set()
        return decode(setup, decoder, *arguments)

    def verified(*arguments):
        met.append(greedy_begun.wait(30))
        return verify(*arguments)

    monkeypatch.setattr(evaluation, "decode", decoded)
    monkeypatch.setattr(ProceduralTask, "verify", verified)
    evaluate(setup, weights, 3, heldout_examples(setup, 8))
    assert met == [True, True]


def test_evaluation_samples_anew_at_another_step():
    setup = small_setup()
    weights = initial_weights(setup, setup.model, "weights")
    examples = heldout_examples(setup, 8)
    lines = [without_timings(evaluate(setup, weights, step, examples)) for step in range(4)]
    greedy = [(line["val/accuracy/greedy"], line["val/score/greedy"]) for line in lines]
    assert len(set(greedy)) == 1
    sampled = [(line["val/score/sampled"], line["val/response_length/mean"]) for line in lines]
    assert len(set(sampled)) > 1


class Finite:
    """A task with few held-out prompts."""

    name = "finite"

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
    examples = heldout_examples(setup, 8)
    assert [example.prompt for example in examples] == [f"{i}=" for i in range(expected)]


def test_what_fills_up_a_batch():
    one, two, three = (Example(f"{i}=", "0") for i in range(3))
    assert filled_up([one, two, three], 4) == [one, two, three, one]
    assert filled_up([one, two], 5) == [one, two, one, two, one]
    assert filled_up([one, two, three], 3) == [one, two, three]


@pytest.mark.slow
def test_what_fills_up_a_batch_does_not_count():
    """Five prompts on four devices are the five on one."""
    found = []
    for layout in ("dp1", "dp4"):
        setup = small_setup(run=small_run(layout=layout))
        weights = initial_weights(setup, setup.model, "weights")
        found.append(without_timings(evaluate(setup, weights, 3, heldout_examples(setup, 5))))
    assert found[0]["val/score/greedy"] == found[1]["val/score/greedy"]
    assert found[0]["val/accuracy/greedy"] * 5 == round(found[0]["val/accuracy/greedy"] * 5)


def test_heldout_prompts_of_an_endless_task():
    setup = small_setup()
    assert heldout_examples(setup, 3) == [setup.task.heldout(i) for i in range(3)]
    trained = {setup.task.train(i).prompt for i in range(300)}
    assert trained.isdisjoint(example.prompt for example in heldout_examples(setup, 300))
    assert np.unique([example.prompt for example in heldout_examples(setup, 300)]).size > 3
