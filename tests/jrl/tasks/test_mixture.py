"""Mixtures of tasks: order, verdicts and held-out prompts."""

from collections import Counter

import pytest

from jrl.tasks import Task, load_task
from jrl.tasks.mixture import WeightedRoundRobin, task_names


def test_turns_follow_the_weights():
    turns = WeightedRoundRobin([3.0, 1.0, 0.5], [None] * 3)
    given = [turns[index][0] for index in range(90)]
    # Never more than a turn away from the share of 3, 1 and 1/2 in 4 1/2.
    for index in range(1, 91):
        counts = Counter(given[:index])
        for task, weight in enumerate((3.0, 1.0, 0.5)):
            assert abs(counts[task] - index * weight / 4.5) <= 1
    assert [turns[index][1] for index in range(90) if given[index] == 1] == list(range(20))


def test_round_robin_skips_exhausted_tasks():
    turns = WeightedRoundRobin([1.0, 1.0], [2, 5])
    assert [turns[index] for index in range(7)] == [
        *((0, 0), (1, 0), (0, 1), (1, 1)),
        *((1, 2), (1, 3), (1, 4)),
    ]


def test_each_example_is_its_tasks_and_judged_by_it():
    task = load_task("3 sort + countdown", 5)
    assert isinstance(task, Task) and task_names(task) == ("sort", "countdown")
    examples = [task.train(index) for index in range(8)]
    assert Counter(example.task for example in examples) == {"sort": 6, "countdown": 2}
    alone = load_task("sort", 5)
    assert [e for e in examples if e.task == "sort"] == [alone.train(n) for n in range(6)]
    assert [task.train(index) for index in reversed(range(8))] == examples[::-1]
    verdicts = task.verify(examples, [example.answer for example in examples])
    assert all(verdict.correct for verdict in verdicts)
    assert [v.reason for v in task.verify(examples, ["1"] * 8)].count("wrong") == 8
    assert task.heldout_size is None
    assert {task.heldout(index).task for index in range(4)} == {"sort", "countdown"}
    assert task.max_prompt_length == len("10,11,12=99:")
    assert set(task.characters) == set("()*+,-/0123456789:=")


def test_held_out_lists_are_used_up(tmp_path, monkeypatch):
    source = "class make:\n  prompts = [{'prompt': p, 'answer': p} for p in '%s']\n"
    source += "  heldout = [{'prompt': p, 'answer': p} for p in '%s']\n"
    source += "  def reward(self, prompt, completion): return completion == prompt\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(source % ("abc", "uvwx"))
    (tmp_path / "b.py").write_text(source % ("def", "yz"))
    (tmp_path / "c.py").write_text(source % ("ghu", "kl"))
    task = load_task("a.py:make + b.py:make", 0, workers=1)
    assert task.heldout_size == 6
    assert "".join(task.heldout(index).prompt for index in range(6)) == "uyvzwx"
    task.close()
    with pytest.raises(ValueError, match=r"task=c\.py:make trains on 1 prompts that task=a\.py:m"):
        load_task("a.py:make + c.py:make", 0, workers=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sort + sort", r"task='sort \+ sort' has one task twice"),
        ("0 sort + countdown", "the weight of '0 sort' must be above 0"),
        ("sort + srot", "task='srot' is unknown: did you mean sort"),
    ],
)
def test_mixtures_that_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_task(spec, 0)
