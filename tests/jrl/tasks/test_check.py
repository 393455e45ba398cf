"""Check of verifiers: its attacks and its report."""

import json

import pytest

from jrl.tasks import __main__ as command
from jrl.tasks.check import (
    ATTACKS,
    NUMBER_ATTACKS,
    Case,
    Finding,
    attacks_on,
    check,
    format_report,
    load_cases,
)
from jrl.tasks.task import Example
from jrl.tasks.workers import pool

REWARDS = """
def holds_it(prompt, completion, answer):
    return float(answer in completion)

def never(prompt, completion):
    return 0.0

def fails(prompt, completion, answer):
    if "or" in completion:
        raise ValueError("no")
    return {"correct": float(completion == answer), "format": 0.5}

class Mine:
    prompts = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10, 30)]
    def reward(self, prompt, completion, answer):
        return 1.0 if completion == answer else 0.5 * completion.startswith(answer)
"""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setattr(pool, "default_workers", lambda: 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.mark.slow
def test_a_file_of_prompts_is_checked_by_table_and_attacks(tmp_path, capsys):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {n}+{n}?", "answer": 2 * n} for n in range(10, 30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    number = len(load_cases()) + 8 * (len(ATTACKS) + len(NUMBER_ATTACKS) + 1)
    expected = f"{path}: {number} answers, 0 wrong ones get the full score, 0 wrong ones a partial "
    assert said.startswith(expected)
    assert len(said.splitlines()) == 1
    # Under the other rule what is still to be worked out is right, the question among it.
    gamed = [each.case for each in check(f"jsonl:{path}", answers="evaluated") if each.gamed]
    assert {case.kind for case in gamed if not case.unevaluated} == {
        "still to be worked out",
        "the prompt again",
    }
    assert any(case.unevaluated for case in gamed)


def test_a_reward_that_looks_for_the_answer_is_gamed(file, capsys):
    assert command.main(["check", f"{file}:holds_it"]) == 1
    said = capsys.readouterr().out
    assert "Wrong, with the score of the reference answer:" in said
    assert "'42' <- '41 or 42': 1" in said
    assert "Right, with less than the score of the reference answer:" in said
    assert len(said.splitlines()) < 90


def test_a_reward_that_gives_nothing_to_anything(file):
    assert all(each.gamed == (each.case.verdict != "right") for each in check(f"{file}:never"))


def test_failures_and_parts(file):
    findings = check(f"{file}:fails")
    gamed = [each.case.completion for each in findings if each.gamed]
    assert not [completion for completion in gamed if "or" in completion]
    assert gamed == []  # a part named "correct" decides, whatever the others are worth


def test_a_task_of_ones_own_is_attacked_by_its_prompts(file):
    findings = check(f"{file}:Mine")
    assert {each.case.kind for each in findings} == {
        *ATTACKS,
        *NUMBER_ATTACKS,
        "the reference answer",
    }
    assert not any(each.gamed or each.missed for each in findings)
    partly = {each.case.kind for each in findings if each.partly}
    assert partly == {"two answers", "still to be worked out"}


def test_built_in_tasks_are_not_gamed():
    for task in ("sort", "addition", "countdown", "progression", "scratchpad"):
        findings = check(task)
        assert findings
        gamed = {each.case.kind for each in findings if each.gamed}
        # What stands before its last marker is the policy's own: it may be another answer.
        last_counts = {"two answers, in reverse order", "a list of guesses"}
        assert gamed == (last_counts if task == "scratchpad" else set())
        assert not any(each.missed for each in findings)


@pytest.mark.slow
def test_generators_that_reward_garbage_are_named():
    gamed = {each.case.kind for each in check("gym:game_of_life_halting") if each.gamed}
    assert "garbage" in gamed
    assert not any(each.gamed for each in check("gym:basic_arithmetic"))


def test_check_refuses_target(file, tmp_path, capsys):
    for target, why in (
        ("guess", "is scored by its environment, turn by turn"),
        ("srot", "is unknown: did you mean sort"),
        (f"{file}:nothing", "it has no nothing"),
        (str(tmp_path / "absent.jsonl"), "cannot be read"),
    ):
        assert command.main(["check", target]) == 2
        assert why in capsys.readouterr().err


def test_attacks_need_another_answer():
    assert attacks_on([Example("a", "1"), Example("b", "1")]) == []
    assert attacks_on([Example("a", ""), Example("b", "1")]) == []
    pairs = attacks_on([Example("a", "1"), Example("b", "2")])
    found = {case.kind: case for _, case in pairs}
    assert found["two answers"].completion == "2 or 1"  # of the second prompt, the last one made
    assert found["an interval"].completion == "[2, 29]"


def test_the_page_lists_as_many_as_fit():
    case = Case("x", "1", "2" * 100, "wrong", because="why")
    said = format_report("t", [Finding(case, 1.0, 1.0, 0.0)] * 30)
    assert said.count("'222") == 20
    assert "  and 10 more" in said
    assert "...': 1  # why" in said
