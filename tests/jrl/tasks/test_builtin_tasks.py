"""Built-in tasks: references score full marks, garbage none, and held-out prompts stay out."""

import functools
import os
import subprocess
import sys

import pytest

from jrl.tasks.load import BUILT_IN, load_task
from jrl.tasks.task import Example, Task, Verdict
from jrl.text.tokenizer import Tokenizer

NUM_EXAMPLES = 1000

GARBAGE = [
    *("", " ", "\n", "\0", "\ud800"),
    *("0", "=", "#", "-", ")", "((", "abc", "nan", "1e9", "0x10", "1_0", "None", "--1", "1#2#"),
    *("٣٤٥", "\uff11\uff12\uff13", "²", "½", "é", ",,"),
    *("👩‍🚀", "__import__('os')", "#" * 50),
    *("9" * 100_000, "(" * 100_000, "-" * 100_000, "1+" * 50_000, "#" + "9" * 10_000),
]


@pytest.fixture(params=list(BUILT_IN))
def task(request) -> Task:
    return BUILT_IN[request.param](7)


@functools.cache
def drawn(name: str) -> tuple[list[Example], list[Example]]:
    """Many examples of the task, for training and held out."""
    task = BUILT_IN[name](7)
    train = [task.train(index) for index in range(NUM_EXAMPLES)]
    return train, [task.heldout(index) for index in range(NUM_EXAMPLES // 3)]


def near_misses(example: Example) -> list[str]:
    """Completions that differ little from the answer, and must not score."""
    answer = example.answer
    return [
        answer[:-1],
        answer + "0",
        answer + "=",
        answer + "\n1",
        example.prompt,
        answer[:-1] + str((int(answer[-1]) + 1) % 10) if answer[-1].isdigit() else answer + "+1",
    ]


def test_verify_gives_reference_full_marks(task):
    examples, _ = drawn(task.name)
    verdicts = task.verify(examples, [example.answer for example in examples])
    assert verdicts == [Verdict(1.0, "correct")] * NUM_EXAMPLES


def test_verify_gives_garbage_nothing(task):
    for example in [task.train(0), task.heldout(1)]:
        verdicts = task.verify([example] * len(GARBAGE), GARBAGE)
        assert {verdict.score for verdict in verdicts} == {0.0}
        assert {verdict.reason for verdict in verdicts} <= {"wrong", "unparsable"}
        assert verdicts[0].reason == "unparsable"


def test_verify_gives_near_misses_nothing(task):
    for index in range(50):
        example = task.train(index)
        misses = near_misses(example)
        for miss, verdict in zip(misses, task.verify([example] * len(misses), misses), strict=True):
            assert verdict.score == 0.0, (example, miss)


def test_verify_gives_answers_of_other_prompts_nothing(task):
    # An answer of another prompt scores only where the two prompts ask for the same.
    examples = [task.train(index) for index in range(200)]
    answers = [example.answer for example in examples]
    verdicts = task.verify(examples, answers[1:] + answers[:1])
    assert sum(verdict.score for verdict in verdicts) <= 2


def test_task_lengths_and_characters_are_exact(task):
    train, heldout = drawn(task.name)
    examples = train + heldout
    assert max(len(example.prompt) for example in examples) == task.max_prompt_length
    assert max(len(example.answer) for example in examples) == task.max_response_length
    seen = set().union(*(example.prompt + example.answer for example in examples))
    assert "".join(sorted(seen)) == task.characters


def test_heldout_prompts_never_occur_in_training(task):
    train, heldout = ({example.prompt for example in side} for side in drawn(task.name))
    other_seed = BUILT_IN[task.name](8)
    train |= {other_seed.train(index).prompt for index in range(NUM_EXAMPLES)}
    assert task.heldout_size is None
    assert len(heldout) > 50
    assert not train & heldout


def test_train_depends_on_seed_and_index(task):
    again, other = BUILT_IN[task.name](7), BUILT_IN[task.name](8)
    backwards = [again.train(index) for index in reversed(range(20))]
    assert [task.train(index) for index in range(20)] == backwards[::-1]
    assert [other.train(index) for index in range(20)] != backwards[::-1]
    assert len({task.train(index).prompt for index in range(20)}) > 10


def test_train_characters_encodes_task(task):
    tokenizer = Tokenizer.train_characters(task.characters)
    example = task.train(0)
    assert tokenizer.decode(tokenizer.encode(example.prompt + example.answer)) == (
        example.prompt + example.answer
    )


def test_task_refuses_index_and_completions(task):
    with pytest.raises(ValueError, match="index=-1 is out of range: it must be 0 or more"):
        task.train(-1)
    with pytest.raises(ValueError, match="completions has 2 entries for 1 examples"):
        task.verify([task.train(0)], ["1", "2"])
    task.close()
    task.close()


PRINT_STREAMS = """
from jrl.tasks import load_task
for name in ("sort", "addition", "scratchpad", "countdown", "progression"):
    task = load_task(name, 5)
    print([task.train(index) for index in range(20)], [task.heldout(index) for index in range(20)])
"""


@pytest.mark.slow
def test_train_is_equal_in_every_process(capsys):
    other = subprocess.run(
        [sys.executable, "-c", PRINT_STREAMS],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Strings have other hashes here, by chance.
    exec(PRINT_STREAMS, {})
    assert capsys.readouterr().out == other
    assert len(other.splitlines()) == 5


def test_train_stream_is_pinned():
    # A resumed run continues its stream: these were drawn once, and stay.
    assert {name: BUILT_IN[name](0).train(0) for name in BUILT_IN} == {
        "sort": Example("40754516=", "01445567"),
        "addition": Example("950+984=", "4391"),
        "scratchpad": Example("560+30271=", "0+1+0=01,6+7+0=13,5+2+1=08,0+0+0=00,0+3+0=03#30831"),
        "countdown": Example("2,3,7=20:", "(7+3)*2"),
        "progression": Example("58,54,50=", "46,42,38"),
    }


ANSWERED = {
    "sort": (
        Example("31415926=", "11234569"),
        {
            "correct": ["11234569"],
            "wrong": ["11234596", "1123456", "112345699"],
            "unparsable": ["1123456 9"],
        },
    ),
    "scratchpad": (
        Example("47+385=", "7+5+0=12,4+8+1=13,0+3+1=04#432"),
        {
            "correct": ["#432", "any thoughts, #1#2#432"],
            "wrong": ["7+5+0=12,4+8+1=13,0+3+1=04#433", "7+5+0=12,4+8+1=13,0+3+1=04#0432"],
            "unparsable": ["#432#", "#432 ", "432"],
        },
    ),
    "countdown": (
        Example("3,7,11=40:", "3*11+7"),
        {
            "correct": ["3*11+7", "7 + (11*3)", "-(-7)+11*3"],
            "wrong": [
                *("7+33", "40", "3*11+7+0", "3*11+7+7-7", "3*11*7"),
                *("11/(3-3)+7", "(3+7)/(11-11)", "7/(11-11*3/3)"),
            ],
            "unparsable": [
                *("3*11+7=40", "3*11+", "3**11+7", "3\u00d711+7", "3*11+7\n"),
                "(" * 30 + "3*11+7" + ")" * 30,
            ],
        },
    ),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_verify_tells_reasons(name):
    example, completions_by_reason = ANSWERED[name]
    for reason, completions in completions_by_reason.items():
        verdicts = BUILT_IN[name](0).verify([example] * len(completions), completions)
        assert [verdict.reason for verdict in verdicts] == [reason] * len(completions)


def test_scratchpad_steps_are_true_and_vary_in_length():
    task = BUILT_IN["scratchpad"](0)
    lengths = {len(check_steps(task.train(index)).answer) for index in range(300)}
    assert min(lengths) < 25 < 45 < max(lengths)


def check_steps(example):
    """Checks the steps of an example, and returns it."""
    left, right = map(int, example.prompt.removesuffix("=").split("+"))
    steps, _, result = example.answer.partition("#")
    assert int(result) == left + right
    totals = [step.split("=") for step in steps.split(",")]
    assert all(sum(map(int, terms.split("+"))) == int(total) for terms, total in totals)
    return example


@pytest.mark.parametrize(("spec", "least", "most"), [("24", 2, 24), ("5-22", 5, 22), ("7-7", 7, 7)])
def test_long_operands_have_a_heavy_tail(spec, least, most):
    task = load_task(f"scratchpad:{spec}", 0)
    examples = [check_steps(task.train(index)) for index in range(400)]
    digits = [len(example.prompt.split("+")[0]) for example in examples]
    assert all(2 * length + 2 == len(e.prompt) for length, e in zip(digits, examples, strict=True))
    assert min(digits) == least and max(digits) == most
    for length in range(least + 1, most + 1):
        # A Pareto variable of exponent 3/2: the share of 400 draws is within four deviations.
        share = (least / length) ** 1.5
        found = sum(each >= length for each in digits) / len(digits)
        assert abs(found - share) < 4 * (share * (1 - share) / len(digits)) ** 0.5
    longest = max(examples, key=lambda example: len(example.answer))
    assert len(longest.answer) <= task.max_response_length
    assert len(longest.prompt) == task.max_prompt_length
    assert task.name == f"scratchpad:{spec}"


def test_countdown_divides_exactly():
    task, example = BUILT_IN["countdown"](0), Example("1,3,3=1:", "1*3/3")
    assert task.verify([example], ["1/3*3"])[0].reason == "correct"
    assert task.verify([Example("2,6,12=1:", "12/(2*6)")], ["12/2*6"])[0].reason == "wrong"


@pytest.mark.parametrize(
    ("score", "reason"),
    [(1.0, "wrong"), (0.0, "correct"), (1.0, "partial"), (0.5, "correct"), (0.0, "x")],
)
def test_verdicts_are_consistent(score, reason):
    with pytest.raises(ValueError, match=rf"score={score} does not go with reason='{reason}'"):
        Verdict(score, reason)


@pytest.mark.parametrize("name", ["sort", "addition", "scratchpad", "countdown", "progression"])
def test_reasoning_models_may_do_built_in_tasks(name):
    task = BUILT_IN[name](0)
    example = task.train(0)
    forms = [
        "{}",
        "<think>\nhm, {}0\n</think>\n\n{}",
        "<answer>{}</answer>",
        r"It is \boxed{{{}}}.",
    ]
    forms = [
        form.replace("{}", example.answer).replace("{{", "{").replace("}}", "}") for form in forms
    ]
    verdicts = task.verify([example] * len(forms), forms)
    assert [verdict.reason for verdict in verdicts] == ["correct"] * len(forms)
    cut = task.verify([example], [f"<think>{example.answer}"])
    assert [verdict.reason for verdict in cut] == ["unparsable"]


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_no_character_of_a_built_in_task_makes_a_mark(name):
    """Completions of character models are compared literally."""
    characters = BUILT_IN[name](0).characters
    assert not set(characters) & set("<\\ \n\t")
