"""Word problems: the arithmetic is true, wordings vary, and only a number in final form scores."""

import re
from math import prod

import pytest

from jrl.tasks.load import load_task
from jrl.tasks.task import Example
from jrl.tasks.word_problems import KINDS, NUM_PROBLEMS, score_number

TASK = load_task("word-problems", 3)
HELD_OUT = [TASK.heldout(index) for index in range(TASK.heldout_size or 0)]
TRAINING = [TASK.train(index) for index in range(NUM_PROBLEMS - len(HELD_OUT))]
PROMPTS = {example.prompt for example in TRAINING + HELD_OUT}
GROWING = ("more", "together", "older", "How old will")
SHRINKING = ("lost", "gives", "younger", "How old was", "left", "closer")


def work_out(prompt: str) -> int:
    """The answer, by the words of the prompt."""
    first, second = map(int, re.findall(r"\d+", prompt))
    if any(word in prompt for word in ("equal", "the same number", "put into")):
        assert first % second == 0
        return first // second
    if any(word in prompt for word in SHRINKING):
        return first - second
    if any(word in prompt for word in GROWING):
        return first + second
    return prod((first, second))


def test_answers_are_those_of_the_problems():
    for example in TRAINING + HELD_OUT:
        assert example.answer == str(work_out(example.prompt)), example.prompt
        assert int(example.answer) > 0


def test_no_answer_is_a_number_of_its_prompt():
    for example in TRAINING + HELD_OUT:
        assert example.answer not in re.findall(r"\d+", example.prompt)


def test_every_wording_occurs_with_many_numbers():
    prompts = [example.prompt for example in TRAINING]
    for text in (text for _, *texts in KINDS for text in texts):
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", r"(\\w+)", re.escape(text)))
        numbers = {tuple(re.findall(r"\d+", p)) for p in prompts if pattern.fullmatch(p)}
        assert len(numbers) > 10, text


def test_held_out_prompts_never_occur_in_training():
    assert len(PROMPTS) == NUM_PROBLEMS
    assert 0.08 < len(HELD_OUT) / NUM_PROBLEMS < 0.12
    other_seed = load_task("word-problems", 4)
    training = [other_seed.train(index).prompt for index in range(100)]
    assert training != [example.prompt for example in TRAINING[:100]]
    assert not set(training) & {example.prompt for example in HELD_OUT}


def test_held_out_prompts_are_selected_as_those_of_a_file():
    assert load_task("word-problems", 0, held_out="100").heldout_size == 100
    with pytest.raises(ValueError, match="task=word-problems draws its prompts"):
        load_task("word-problems", 0, held_out="test.jsonl")


def test_a_chat_model_reads_solved_problems_first():
    (role, _), *shots = TRAINING[0].messages[:-1]
    assert role == "system"
    for (_, problem), (_, answer) in zip(shots[::2], shots[1::2], strict=True):
        assert score_number(answer, work_out(problem)).correct
        assert problem not in PROMPTS
    for example in TRAINING:
        assert example.messages == (*TRAINING[0].messages[:-1], ("user", example.prompt))


def test_problems_do_not_change_with_versions():
    # The list was drawn once, and results are compared on it.
    task = load_task("word-problems", 0)
    assert [(e.prompt, e.answer) for e in (task.train(0), task.heldout(0))] == [
        (
            "Victor shares 18 cards equally among 3 friends. How many cards does each friend get?",
            "6",
        ),
        ("Grace is 13 years old. How old will Grace be in 6 years?", "19"),
    ]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        *(("17", "correct"), ("17 years", "correct"), ("Iris is 17 years old.", "correct")),
        *(("14 + 3 = 17", "correct"), (r"\boxed{17}", "correct"), ("17.0", "correct")),
        *(("14 + 3", "unevaluated"), ("14 + 3 =", "unevaluated"), ("20 - 3", "unevaluated")),
        *(("16 or 17", "wrong"), ("16, 17, 18", "wrong"), ("more than 16", "wrong")),
        *(("14 + 3 = 18", "wrong"), ("3", "wrong"), ("-17", "wrong"), ("17%", "wrong")),
        *(("170", "wrong"), ("1", "wrong"), ("0x11", "wrong"), ("17x", "wrong")),
        *(("", "unparsable"), ("seventeen", "unparsable"), ("Iris is older.", "unparsable")),
        *(("9" * 100_000, "wrong"), ("(" * 100_000, "unparsable"), ("1+" * 50_000, "wrong")),
    ],
)
def test_numbers_in_final_form_score(completion, reason):
    example = Example("Ben is 14 years old. Iris is 3 years older. How old is Iris?", "17")
    assert TASK.verify([example], [completion])[0].reason == reason


def test_the_prompt_repeated_scores_nothing():
    verdicts = TASK.verify(HELD_OUT, [example.prompt for example in HELD_OUT])
    assert {verdict.score for verdict in verdicts} == {0.0}
