"""Completions of a grammar of denials, bounds, hedges and decorations: none scores wrongly.

The words of the grammar are its own, not the reader's tables. `{}` is the right answer and `[]`
another one.
"""

import random
from importlib import import_module

import pytest

from jrl.tasks.answers.verdict import Judge

NUMBERS = ["42", "7", "1,250", "0.5", "-3", "18.75", "3/4", "250000", "96"]
FORMULAS = [r"2\sqrt{3}", r"x^2+1", r"\frac{\pi}{2}"]
WORDS = ["Paris", "Monday", "hexagon"]
LETTERS = ["B", "D"]

DENIALS = [
    *("not {}", "It is not {}.", "It isn't {}.", "It can't be {}.", "It cannot possibly be {}."),
    *("It is never {}.", "It is anything but {}.", "It won't be {}.", "I don't think it is {}."),
    *("I do not believe that the answer is {}.", "I doubt that it is {}.", "It is far from {}."),
    *("The answer is not {}.", "The answer isn't {}.", "The answer is certainly not {}."),
    *("{} is wrong.", "{} is not the answer.", "{} is incorrect.", "{} can't be right."),
    *("The answer is {}. No, that is wrong.", "The answer is {}? No.", "{}, which is wrong."),
    *("It is impossible that it is {}.", "It is not true that it is {}.", "neither {} nor []"),
    *("The wrong answer is {}.", "There is no way that it is {}.", "It is unlikely to be {}."),
    *("Nobody would say it is not {}.", "It was said to be {}, but that is not right."),
]
BOUNDS = [
    *("more than {}", "less than {}", "at least {}", "at most {}", "{} at most", "{} at least"),
    *("over {}", "under {}", "above {}", "below {}", "up to {}", "{} or more", "{} or less"),
    *("no more than {}", "not less than {}", "just under {}", "{} and up", "exceeding {}"),
    *("It is greater than {}.", "It costs over {}.", "There are {} or more of them."),
    "close to {}",
    *("between {} and []", "from [] to {}", "≥ {}", "< {}", "{}+", "{} give or take 1"),
]
PARTS = [
    *("half of {}", "twice {}", "double {}", "a third of {}", "{} dozen", "{} hundred"),
    "{} million",
    *("10% of {}", "the square root of {}", "{} thousand", "three quarters of {}"),
    "the opposite of {}",
    *(r"\pm {}", "± {}", "{} ± 1", "plus or minus {}", "{} plus or minus 1", "√{}", "{}‰", "{}k"),
]
HEDGES = [
    *("{} or []", "[] or {}", "{}, or []", "{}? Or []?", "either {} or []", "{} or maybe []"),
    *("{}, maybe []", "{} / []", "{} and []", r"\boxed{{}} or \boxed{[]}"),
    r"\boxed{[]} or \boxed{{}}",
    *("<answer>{}</answer> or <answer>[]</answer>", "<answer>[]</answer>, or <answer>{}</answer>"),
    *("The answer is {} or [].", "The answer is either [] or {}.", "It is {}, or possibly []."),
    *(r"\boxed{{} \text{ or } []}", "{}; []", "perhaps [], perhaps {}"),
]
DECORATIONS = [
    "%s",
    "**%s**",
    "Final answer: %s",
    "So we get this: %s",
    "<answer>%s</answer>",
    "%s\n",
]
STATEMENTS = [
    *("{}", "**{}**", "The answer is {}.", "Answer: {}", "It is {}.", "#### {}", "$${}$$", "({})"),
    *(r"\boxed{{}}", "<answer>{}</answer>", "So it is {}.", "Not [], but {}."),
    "The answer is {}, not [].",
    *("[] is wrong, so it is {}.", "The answer is {}. I am sure.", "The final answer is\n\n{}"),
    *("It can't be [], so the answer is {}.", "Therefore, the answer is **{}**."),
    "I think it is {}.",
    *(r"\boxed{[]} is too much, hence \boxed{{}}", "<think>[] or {}?</think>{}", "A: {}"),
]


@pytest.fixture(scope="module")
def judge():
    return Judge(import_module("jrl.tasks.answers.symbolic"))


def made_of(patterns, answers, seed, num):
    """Completions with the answers that they were made from."""
    rng = random.Random(seed)
    for _ in range(num):
        right, other = rng.sample(answers, 2)
        pattern, decoration = rng.choice(patterns), rng.choice(DECORATIONS)
        yield right, other, pattern, decoration


def filled(pattern, right, other):
    return pattern.replace("{}", right).replace("[]", other)


@pytest.mark.parametrize("kind", ["denials", "bounds", "parts", "hedges"])
@pytest.mark.parametrize("answers", [NUMBERS, FORMULAS, WORDS, LETTERS], ids=lambda each: each[0])
def test_judge_rejects_grammar_of_retractions(judge, kind, answers):
    patterns = {"denials": DENIALS, "bounds": BOUNDS, "parts": PARTS, "hedges": HEDGES}[kind]
    if kind in ("bounds", "parts") and answers in (WORDS, LETTERS):
        pytest.skip("words have no bounds and no multiples")
    scored = [
        (right, completion)
        for right, other, pattern, decoration in made_of(patterns, answers, 1, 60)
        if judge(right, completion := decoration % filled(pattern, right, other)) == "correct"
    ]
    assert scored == []


@pytest.mark.parametrize("answers", [NUMBERS, WORDS, LETTERS], ids=lambda each: each[0])
def test_judge_accepts_grammar_of_statements(judge, answers):
    for right, other, pattern, _ in made_of(STATEMENTS, answers, 2, 60):
        completion = filled(pattern, right, other)
        assert judge(right, completion) == "correct", completion
        assert judge(other, completion) != "correct", completion
