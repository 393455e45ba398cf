"""Contrasts, corrections and cancelled denials: the truth follows from construction."""

import random
from importlib import import_module

import pytest

from jrl.tasks.answers.verdict import Judge

# Sentences that state {v}, whatever else they name.
STATED = """
{v}, not {w}|so {v} (not {w})|It is {v}, not {w}.|The answer is {v} and not {w}.
Not {w}, but {v}.
The answer is not {w}. It is {v}.|The answer isn't {w}, it's {v}.
There's no doubt: it is {v}.
It cannot be anything but {v}.
It isn't hard to see that the answer is {v}.
Sorry, I meant {v}, not {w}.
Someone might say {w}, but that is wrong: the answer is {v}.
He reads the {v}th page.|By the {v}th day|about {v} or so|No: it is {v}.|No tax: {v}
If she had {w} she would have {v}.|If not all of them came then {v} came.|They score {v}.
x_1 = {w}, y_1 = {v}|She handed out {v}.|none other than {v}|{v} apples would be left.
"""
TAKEN_BACK = """
The answer is {v}. Actually {w}.|The answer is {v}. No, it's {w}.
The answer is {v}. Correction: {w}
{v}. I made a mistake.|{v}. That's the wrong answer.|The answer is {v}, but that's wrong.
It is barely {v}.
The answer is {v}. Wait, that is not right.|The answer is {v}. Scratch that.
three times {v}|{v} plus one
{v}? I don't think so.|It is unequal to {v}.|{v} onwards|{v} and counting|starting from {v}
until {v}|x_{{{v}}}
{w}, maybe {v}|{w} xor {v}|{w} as well as {v}|The answer is one of {w}, {v}.
before {v}|It comes before {v}.|it runs along {v}|toward {v}|It is against {v}.
the one preceding {v}
We can rule {v} out.|We ruled {v} out|No one gets {v}.|No one scored {v}|No student has {v}.
Nobody has {v}.|Nothing equals {v}.|None of them is {v}.|Neither of us gets {v}.
If not {w} then {v}|If it is not {w}, then {v}|If the answer isn't {w}, then {v}.
{v} would be the answer if it were possible|{v} would be right, were it possible
{v} might be right if it were even|{v}° + 1|{v} score|{v}th root of {w}|the {v}th prime
the {v}th root|the {v}th odd number|x_1 = {w}, x_2 = {v}|x_{{1}} = {w}, x_{{2}} = {v}
{v} ❌|{w} unless it's {v}
\\boxed{{{w}}} \\lor \\boxed{{{v}}}|Some say {v}, but they are wrong.|One might think {v}, but no.
"""
WORDS = "{v}, not {w}|The answer is {v} (not {w}).|The answer is {v} and not {w}.|Definitely {v}."
WORDS += "|There is no doubt that the answer is {v}.|**Final Answer**\n\n{v}"
WORDS_TAKEN_BACK = "The answer is {v}. Actually, it's {w}.|The answer is {v}. Correction: {w}"
WORDS_TAKEN_BACK += "|The answer is {v}, but that's wrong.|The answer is {v} (or {w}).|{v}\n{w}"
WORDS_TAKEN_BACK += "|The answer is {v}. I made a mistake: it is {w}.|non-{v}|opposite of {v}"
WORDS_TAKEN_BACK += "|It's {v} or it's {w}|It's {w} or it's {v}|It is {w} or it is {v}"
WORDS_TAKEN_BACK += "|The answer is the opposite of {v}."
WORDS_TAKEN_BACK += "|The answer is non-{v}.|No one says {v}|the reciprocal of {v}"
POLAR = "no|No.|No, it is not.|The answer is no.|Is it yes? No.|No, because it is odd.|so no"
POLAR_UNSTATED = "no yes|no/yes|no & yes|yes no|yes/no|no? No.|No? Wrong.|no or yes|not no"


@pytest.fixture(scope="module")
def judge():
    return Judge(import_module("jrl.tasks.answers.symbolic"))


@pytest.mark.parametrize("seed", range(3))
def test_numbers_stated_score_and_numbers_taken_back_do_not(judge, seed):
    draw = random.Random(seed)
    found, expected = {}, {}
    for table, is_stated in ((STATED, True), (TAKEN_BACK, False)):
        for form in table.strip().replace("\n", "|").split("|"):
            v, w = map(str, draw.sample(range(11, 999), 2))
            text = form.format(v=v, w=w)
            found[text] = judge(v, text) == "correct", judge(w, text) == "correct"
            expected[text] = is_stated, False if is_stated else found[text][1]
    assert found == expected


@pytest.mark.parametrize(("gold", "other"), [("Paris", "Rome"), ("D", "B"), ("blue", "red")])
def test_words_stated_score_and_words_taken_back_do_not(judge, gold, other):
    for table, is_stated in ((WORDS, True), (WORDS_TAKEN_BACK, False)):
        texts = [form.format(v=gold, w=other) for form in table.split("|")]
        assert {t: judge(gold, t) == "correct" for t in texts} == dict.fromkeys(texts, is_stated)


def test_no_is_stated_alone_and_not_beside_yes(judge):
    stated, unstated = POLAR.split("|"), [*POLAR_UNSTATED.split("|"), "no | yes"]
    assert {t: judge("no", t) == "correct" for t in stated} == dict.fromkeys(stated, True)
    for gold in ("no", "yes"):
        assert [t for t in unstated if judge(gold, t) == "correct"] == []
