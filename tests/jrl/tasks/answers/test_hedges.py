"""Two candidates of which neither is stated, and answers that are taken back, score nothing.

The forms are combined with numbers, words, letters and formulas. `{a}` and `{b}` are the
candidates, and "<>" ends a line. Both are tried as the reference answer.
"""

import itertools
from importlib import import_module

import pytest

from jrl.tasks.answers.denials import (
    is_list,
    is_retracted,
    is_withdrawn,
    offers_another,
    words_of,
)
from jrl.tasks.answers.verdict import Judge

CANDIDATES = {
    "number": ("418", "73"),
    "unit": ("17 km", "$213"),
    "word": ("Paris", "Rome"),
    "polar": ("yes", "no"),
    "letter": ("B", "D"),
    "formula": (r"$2\sqrt{3}$", r"$\frac{\pi}{7}$"),
}
CHOICES = """
{a} or else {b}|either {a} or {b}|{a} or perhaps {b}|{a} or alternatively {b}
{a}, unless it is {b}|maybe {a}, maybe {b}|{a} vs {b}|{a} versus {b}|{a}, alternatively {b}
{a}, or is it {b}|{a}, potentially {b}|{a}, could also be {b}|{a}, but it might be {b}
{a}, otherwise {b}|{a} else {b}|{a} for some and {b} for others|{a}; failing that, {b}
{a} (or {b})|{a} (possibly {b})|{a} as well as {b}|{a} OR {b}|{a} and/or {b}
""".strip().replace("\n", "|")
SENTENCES = """
The answer is {a}. It could also be {b}.|The answer is {a}. Alternatively, it is {b}.
It might be {a}. It might be {b}.|Perhaps {a}. Perhaps {b}.|First guess: {a}. Second guess: {b}.
Guess 1: {a}<>Guess 2: {b}|Option 1: {a}<>Option 2: {b}|1. {a}<>2. {b}|* {a}<>* {b}
I cannot decide between {a} and {b}.|Depending on the reading, {a} or {b}.
My answer: {a}, backup: {b}|So {a}. Another answer is {b}.|{a} is possible, so is {b}.
The answer is {a}. Strike that.|The answer is {a}. Ignore that.|The answer is {a}. Never mind.
The answer is {a}. My bad, this is an error.|The answer is {a}. Oops.|It is no longer {a}.
The answer is {a}. I take that back.|The answer is {a}, just kidding.|I withdraw {a}.
""".strip().replace("\n", "|")
STATED = """
The answer is {a}.|Is it {b}? No: it is {a}.|It might be {b}. The answer is {a}.|{a}, not {b}
Either {b} or {a} was expected.<><>The answer is {a}.|Some would say {b}. The answer is {a}.
""".strip().replace("\n", "|")


@pytest.fixture(scope="module")
def judge():
    return Judge(import_module("jrl.tasks.answers.symbolic"))


def completions(forms, a, b):
    for form in forms.split("|"):
        yield form.replace("<>", "\n").replace("{a}", a).replace("{b}", b)


@pytest.mark.parametrize(
    ("kind", "frame"),
    [
        *itertools.product(list(CANDIDATES)[:-1], ["%s", "It is %s.", "The answer is %s."]),
        ("formula", "It is %s."),
    ],
)
def test_judge_rejects_choice_between_candidates(judge, kind, frame):
    for a, b in itertools.permutations(CANDIDATES[kind]):
        texts = [frame % choice for choice in completions(CHOICES, a, b)]
        assert [text for text in texts if judge(a, text) == "correct"] == []


@pytest.mark.parametrize("kind", CANDIDATES)
def test_judge_rejects_choice_over_sentences_and_retraction(judge, kind):
    for a, b in itertools.permutations(CANDIDATES[kind]):
        texts = list(completions(SENTENCES, a, b))
        scored = [text for text in texts for gold in (a, b) if judge(gold, text) == "correct"]
        assert scored == []


@pytest.mark.parametrize("kind", ["number", "word", "letter"])
def test_judge_accepts_statement_behind_rejected_candidate(judge, kind):
    a, b = CANDIDATES[kind]
    texts = list(completions(STATED, a, b))
    assert [text for text in texts if judge(a, text) != "correct"] == []


def test_offers_another_reads_the_words_between_two_candidates():
    assert offers_another(["or"]) and offers_another(words_of(", or maybe"))
    assert not offers_another(words_of("or more boxes; the number of them is"))
    assert not offers_another(["apples", "and"]) and not offers_another([])


def test_is_withdrawn_reads_words_behind_answer():
    assert is_withdrawn(words_of(". Ignore that.")) and not is_withdrawn(words_of(", I am sure."))


def test_is_list_needs_two_short_items_in_succession():
    assert is_list("- 3\n- 4") and is_list("1. red\n2. blue")
    assert not is_list("- 3") and not is_list("- 3 + 4 = 7\n- 7 + 1 = 8")


CONTINUATIONS = """
It should be noted that x is positive.|This should be enough.|This does not contradict the premise.
It no longer depends on x.|Another method is to add the parts.|Another way is by symmetry.
Do not forget this step.|Any questions?|If it were larger, the sum would not fit.
It could be written as a fraction too.|The second case is similar.|Does this make sense?
The first guess was too low.|For others, see the appendix.|While others count, we did not.
It is possible to check this.|If this is unclear, ask.|There is no other possibility.
The alternative would be too small.|Is this right? Yes.
It cannot be negative.|It can't be a fraction.|It could never be larger.|It must not be rounded.
This cannot be simplified further.|It cannot be so large.|It isn't that hard.|It will not change.
It is wrong to divide first.|It would be a mistake to add them.|It is too large to count by hand.
It is false that order matters.|It is not true for other values.|This does not work for odd numbers.
It is not a coincidence.|It is not possible to do better.|That would be impossible otherwise.
No other value satisfies the equation.|Sorry for the long text.|Wait for the next lesson to see why.
Never mind the rounding.|No further steps are needed.|I have not made a mistake.
""".strip().replace("\n", "|")


JUDGEMENTS = """
It cannot be right.|It can't be the answer.|That cannot possibly be correct.|It isn't so.|It is not.
This is wrong because x is odd.|It is a mistake.|It is too large.|It is not true for this problem.
That is not the expected answer.|This is impossible.|It does not work.|It doesn't make sense.
""".strip().replace("\n", "|")


@pytest.mark.parametrize(
    ("reference", "stated"),
    [
        ("42", "The answer is 42."),
        ("42", r"\boxed{42}."),
        ("Paris", "The answer is Paris."),
        ("B", "The answer is B."),
        (r"\frac{\pi}{7}", r"The answer is $\frac{\pi}{7}$."),
    ],
)
def test_judge_accepts_answer_before_ordinary_sentence(judge, reference, stated):
    for sentence in CONTINUATIONS.split("|"):
        for gap in (" ", "\n\n"):
            completion = stated + gap + sentence
            assert judge(reference, completion) == "correct", completion


@pytest.mark.parametrize("kind", ["number", "word", "letter"])
def test_judge_rejects_answer_before_sentence_that_calls_it_wrong(judge, kind):
    answer = CANDIDATES[kind][0]
    texts = [f"The answer is {answer}. {sentence}" for sentence in JUDGEMENTS.split("|")]
    assert [text for text in texts if judge(answer, text) == "correct"] == []


SUBJECTS = ("It", "That", "But this", "Wait that", "The answer")
STATING = ("is", "was", "seems", "must be", "has to be", "would be")
DENYING = ("is not", "isn't", "cannot be", "can't be", "does not seem", "will not be")
WRONG = "wrong|a mistake|impossible|the wrong answer|an incorrect result|too large|excluded"
RIGHT = "right|true|possible|so|it|the answer|my final answer|the correct value|the solution"
ENDS = ("", " because x is odd", " for this problem", " here")
ELSE = ("to divide first", "that order matters", "for other values", "otherwise", "in general")
OTHER = "negative|simplified further|a fraction|a coincidence|so large|that hard|quickly seen"


def test_is_retracted_reads_judgements_on_the_answer():
    for stem, adverb, end in itertools.product(("No it", *SUBJECTS), ("", "clearly "), ENDS):
        for verb, judgement in [
            *itertools.product(STATING, WRONG.split("|")),
            *itertools.product(DENYING, RIGHT.split("|")),
        ]:
            sentence = f"{stem} {verb} {adverb}{judgement}{end}"
            assert is_retracted(words_of(sentence)), sentence


def test_is_retracted_passes_over_judgements_on_something_else():
    for stem, adverb, end in itertools.product(SUBJECTS, ("", "clearly "), ELSE):
        for verb, judgement in [
            *itertools.product(STATING, ("wrong", "a mistake", "impossible")),
            *itertools.product(DENYING, ("right", "possible", *OTHER.split("|"))),
        ]:
            sentence = f"{stem} {verb} {adverb}{judgement} {end}"
            assert not is_retracted(words_of(sentence)), sentence
