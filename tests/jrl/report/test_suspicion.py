"""Suspicious runs are found, and honest runs are not."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from jrl.report import suspicion
from jrl.report.metrics import describe
from jrl.report.suspicion import Lookout, first_suspicion, suspicion_reasons
from jrl.rollout.answer_statistics import Answered, answer_statistics, form_of, is_disputed

HERE = Path(__file__).parent
GAMED = [json.loads(line) for line in (HERE / "gamed_run.jsonl").read_text().splitlines()]
"""A small chat model whose verifier works answers out: it learns to repeat the sum that it is asked
for. Written out by hand after a run of SmolLM2-135M-Instruct."""
HONEST = json.loads((HERE / "honest_runs.json").read_text())
"""Metrics of real runs of the recipes on built-in tasks, step by step; the preset tiny-dense, 16
prompts of 8 completions, 150 steps of warm start and a learning rate of 1e-3 on all but sort."""


def line_of(step, samples):
    """The metrics of a step, as a run has them."""
    scores = [sample["score"] for sample in samples]
    lengths = [len(sample["completion"].split()) for sample in samples]
    answered = [
        Answered(s["prompt"], s["completion"], s["answer"], s["score"] == 1) for s in samples
    ]
    return {
        "step": step,
        "critic/score/mean": sum(scores) / len(scores),
        "critic/score/max": max(scores),
        "critic/score/min": min(scores),
        "response_length/mean": sum(lengths) / len(lengths),
        **answer_statistics(answered),
    }


def steps_of(samples):
    return [
        line_of(step, list(own)) for step, own in groupby(samples, key=lambda each: each["step"])
    ]


def told(lines):
    """Lines of metrics with their suspicion, as a run writes them."""
    lookout, result = Lookout(), []
    for line in lines:
        why = lookout.check(line)
        result.append({**line, suspicion.NAME: float(bool(why))})
    return result


def test_the_gamed_run_is_suspicious_before_half_of_its_score():
    lines = told(steps_of(GAMED))
    scores = [line["critic/score/mean"] for line in lines]
    assert (scores[0], scores[9], scores[19]) == (pytest.approx(0.08, abs=0.02), 0.25, 1.0)
    result = first_suspicion(lines)
    assert result is not None
    step, why = result
    assert max(scores[:step]) < 0.5
    assert "a second verifier, which compares numbers as text, rejects" in why[0]
    # And it stays so while the score rises.
    assert all(line[suspicion.NAME] for line in lines[step - 1 :])


def test_the_same_run_with_honest_answers_is_not():
    """It becomes as terse, as alike and as good, and says the numbers."""
    honest = [
        {**sample, "completion": sample["answer"]} if sample["score"] else sample
        for sample in GAMED
    ]
    lines = told(steps_of(honest))
    assert lines[-1]["answers/top_form"] == 1.0
    assert not any(line[suspicion.NAME] for line in lines)


@pytest.mark.parametrize("name", HONEST)
def test_honest_runs_are_not_suspicious(name):
    columns = HONEST[name]
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    assert len(lines) >= 40
    assert not any(line[suspicion.NAME] for line in told(lines))


def test_honest_runs_are_of_all_recipes_with_rewards():
    from jrl.recipes import RECIPES

    rewarded = {name for name, kind in RECIPES.items() if kind.uses_rewards}
    assert {name.partition(" ")[0] for name in HONEST} == rewarded
    assert len({name.partition(" ")[2] for name in HONEST}) >= 5


@pytest.mark.parametrize("cut", [3, 9, 10, 14, 19])
def test_a_resumed_run_is_as_suspicious(cut):
    lines = steps_of(GAMED)
    full = told(lines)
    resumed = Lookout(full[:cut])
    assert resumed.suspected == any(line[suspicion.NAME] for line in full[:cut])
    again = [float(bool(resumed.check(line))) for line in lines[cut:]]
    assert again == [line[suspicion.NAME] for line in full[cut:]]


def curve(score):
    """Lines of a run whose score changes after ten steps."""
    return [
        {
            "critic/score/mean": 0.1 if number < 10 else score,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
        }
        for number in range(16)
    ]


LEAP = "the mean score leapt from 0.10 to 0.80 while "


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"response_length/mean": (40.0, 8.0)}, "lengths fell from 40 to 8"),
        ({"answers/variety": (1.0, 0.25)}, "the variety of answers fell from 1 to 0.25"),
        ({"answers/top_form": (0.3, 0.95)}, "one form of answer took over (30% before, 95%)"),
        ({"response_length/mean": (40.0, 30.0)}, None),
        ({"answers/variety": (1.0, 0.8)}, None),
        ({"answers/top_form": (0.95, 1.0)}, None),
        ({}, None),
    ],
)
def test_a_leap_while_something_collapses(others, why):
    lines = [
        {**line, **{name: values[number >= 10] for name, values in others.items()}}
        for number, line in enumerate(curve(0.8))
    ]
    assert suspicion_reasons(lines) == ([] if why is None else [LEAP + why])
    # If the score does not leap, nothing is suspicious.
    low = [{**line, "critic/score/mean": 0.1} for line in lines]
    assert suspicion_reasons(low) == []
    # And what a second reader shares is no accident.
    shared = [
        {**line, "answers/shared": 0.1 if n < 10 else 0.8, "answers/disputed": 0.0}
        for n, line in enumerate(lines)
    ]
    assert suspicion_reasons(shared) == []


def test_scores_of_any_range():
    """A reward between -1 and 9 leaps by two, and one between 0 and 100 does not."""
    for least, most, leaps in ((-1.0, 9.0, True), (0.0, 100.0, False)):
        lines = [
            {
                "critic/score/mean": 1.0 if n < 10 else 4.0,
                "critic/score/max": most,
                "critic/score/min": least,
                "response_length/mean": 40.0 if n < 10 else 8.0,
            }
            for n in range(16)
        ]
        assert bool(suspicion_reasons(lines)) == leaps


def test_forms_of_answers():
    assert form_of("17 + 25") == form_of("3 + 4") == "0 + 0"
    assert form_of("The sum of 17 and 25 is 42.") == "a 0 a 0 a 0."
    assert form_of("42") == form_of("1,042.5") == "0"


def test_second_verifier_share():
    def disputed(gold, text, correct=True):
        return is_disputed(Answered("p", text, gold, correct))

    assert disputed("42", "17 + 25")
    assert disputed("42", "41 or 42")
    assert disputed("42", "<think>42")
    assert not disputed("42", "17 + 25 = 42")
    assert not disputed("42", "The answer is 42.")
    assert not disputed("1/2", "0.5")
    assert not disputed("42", "17 + 25", correct=False)
    assert not disputed("7+11*3", "3*11+7")  # the gold answer is no number
    assert not disputed("", "17 + 25")


def test_every_metric_is_defined():
    assert answer_statistics([]) == {}
    result = answer_statistics(
        [Answered("p", "17 + 25", "42", True), Answered("p", "42", "42", True)]
    )
    assert result == {
        "answers/variety": 1.0,
        "answers/top_form": 0.5,
        "answers/shared": 0.5,
        "answers/disputed": 0.5,
    }
    assert all(describe(name) is not None for name in (*result, suspicion.NAME))
    assert describe(suspicion.NAME).unit == "0 or 1"
