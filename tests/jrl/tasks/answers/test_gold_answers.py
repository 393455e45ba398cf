"""Solutions of GSM8K with their labels, and no text that scores for two answers.

gsm8k_solutions.jsonl holds 41 of the 5,276 labelled solutions in
grade_school_math/data/example_model_solutions.jsonl of https://github.com/openai/grade-school-math
(Copyright (c) 2021 OpenAI, MIT licence): short ones drawn with a seed, and one whose answer stands
below a sentence with "the answer as a percentage:".
"""

import json
import time
from importlib import import_module
from pathlib import Path

import pytest

from jrl.tasks.answers.verdict import Judge
from jrl.tasks.check import load_cases

SOLUTIONS = Path(__file__).with_name("gsm8k_solutions.jsonl")
PHRASES = [
    *("{}", "The answer is {}.", "#### {}", r"\boxed{{{}}}", "<answer>{}</answer>", "A: {}"),
    *("Answer: {}", "So she has {} pens.", "**{}**", "It costs ${}.", "= {}", "It is {} in all."),
    *("<think>I need 3 and 4</think>It is {}.", "3 + 4 = 7, so we get {} dollars in total"),
]


@pytest.fixture(scope="module")
def symbolic():
    return import_module("jrl.tasks.answers.symbolic")


@pytest.fixture(scope="module")
def judge(symbolic):
    return Judge(symbolic)


def test_labelled_solutions_agree_with_their_labels(judge):
    rows = [json.loads(line) for line in SOLUTIONS.read_text(encoding="utf-8").splitlines()]
    assert {row["is_correct"] for row in rows} == {True, False}
    for row in rows:
        is_right = judge(row["gold"], row["solution"]) == "correct"
        assert is_right == row["is_correct"], row


@pytest.mark.parametrize("gold", ["18", "70000", "1,250", "0.5", "-3", "20", "3.75", "1600000"])
def test_a_gold_answer_accepts_itself_in_usual_phrases_and_no_other(judge, gold):
    others = [other for other in ("18", "20", "0.5", "-3", "7", "1,251") if other != gold]
    for phrase in PHRASES:
        assert judge(gold, phrase.format(gold)) == "correct", phrase
        for other in others:
            assert judge(gold, phrase.format(other)) != "correct", (phrase, other)


NUMBERS = ("18", "5", "-5", "42", "12", "1000", "2.5", "1/3", "-61", "0.3", "2", "7", "0.001")
WORDS = ("yes", "no", "B", "C", "D", "10:30")


@pytest.mark.parametrize("references", [NUMBERS, WORDS])
def test_no_text_scores_for_two_references_that_differ(judge, references):
    """References of one kind: "(B) 42" names an option and its number."""
    completions = {case.completion for case in load_cases() if case.reference in references}
    for completion in sorted(completions):
        scored = [gold for gold in references if judge(gold, completion) == "correct"]
        assert len(scored) <= 1, (completion, scored)


@pytest.mark.parametrize(
    "formula",
    [
        *(r"\binom{10^6}{5*10^5}", r"\sqrt{2}\cdot 9^{9^{9}}", "x^{9^{9^9}}", r"\sqrt{50000!}"),
        *(r"\ln(9^{999999})", r"(x+1)^{10000}", r"\dbinom{100000}{50000}x", r"(10^5)!\sqrt 2"),
    ],
)
def test_numbers_of_formulas_are_bounded_before_they_are_worked_out(judge, symbolic, formula):
    begin = time.process_time()
    assert symbolic.read(formula) == ()
    assert judge(r"2\sqrt{3}", rf"\boxed{{{formula}}}") == "wrong"
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize("gold", ["42‰", r"\begin{tikzpicture}", "?!", r"\binom{10^6}{5*10^5}"])
def test_a_reference_that_cannot_be_read_is_an_error(judge, gold):
    with pytest.raises(ValueError, match="it holds no"):
        judge(gold, "42")


@pytest.mark.parametrize(
    ("gold", "equal", "others"),
    [
        (r"\pi r^2 h", [r"h\pi r^2", r"\pi h r^2", r"r^2h\pi"], [r"\pi r^2", r"\pi r^2 l"]),
        (
            r"\frac{1}{2} b h",
            [r"\frac{bh}{2}", r"b h/2"],
            [r"\frac{1}{2}", r"\frac{1}{2} b", "b/2"],
        ),
        ("2 r h", ["2rh", "2 h r"], ["2r", "2", "2 r m"]),
    ],
)
def test_the_last_variable_of_a_product_is_no_unit(judge, gold, equal, others):
    for form in ("{}", "${}$", "The answer is ${}$.", r"\boxed{{{}}}", "It is {}."):
        assert [t for t in equal if judge(gold, form.format(t)) != "correct"] == [], form
        assert [t for t in others if judge(gold, form.format(t)) == "correct"] == [], form


def test_a_comma_between_integers_separates_numbers_on_both_sides(judge):
    golds = ["5/2", "2.5", "2,5", "0,5", "0.5", "1/2"]
    for form in ("{}", "${}$", "The answer is {}.", r"\boxed{{{}}}", "<answer>{}</answer>"):
        for text in ("2,5", "2, 5", "0,5"):
            scored = [gold for gold in golds if judge(gold, form.format(text)) == "correct"]
            assert scored == [text.replace(" ", "")], (form, text)


def test_a_formula_restated_is_right_by_the_rule_of_values(symbolic):
    judge = Judge(symbolic, "evaluated")
    for gold, completion in [("x^2-1", "(x-1)(x+1)"), (r"\ln 6", r"\ln 2+\ln 3")]:
        assert judge(gold, completion) == "correct"
