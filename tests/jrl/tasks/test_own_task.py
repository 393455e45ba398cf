"""Custom tasks: loading, rewards in worker processes, and failures by kind."""

import sys

import pytest

from jrl.tasks import Task, load_task
from jrl.tasks.data.split import HeldOut
from jrl.tasks.load import custom_files, custom_prompts
from jrl.tasks.references import copy_name, parse_reference
from jrl.tasks.rewards import CustomReward, RewardSettings
from jrl.tasks.task import CompletionText, Example

SOURCE = '''
import time
from dataclasses import dataclass


@dataclass
class Sums:
    """Fields of a record that are no texts reach the reward as they are."""

    limit: int = 30

    @property
    def prompts(self):
        return [
            {"prompt": f"{n}+{n}=", "answer": 2 * n, "terms": [n, n]} for n in range(self.limit)
        ]

    weights = {"right": 1.0, "short": 0.25}

    async def reward(self, prompt, completion, *, answer, terms):
        assert answer == sum(terms)
        if completion == "raises":
            raise RuntimeError("boom")
        if completion == "waits":
            time.sleep(60)
        odd = {"nan": {"right": float("nan")}, "text": "1", "none": None, "part": {"long": 1.0}}
        if completion in odd:
            return odd[completion]
        parts = {"right": completion == str(answer), "short": len(completion) < 3}
        return parts if completion != "bare" else {"right": 0.0}


make = Sums


def length(prompt, completion):
    return len(completion) / 4
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(SOURCE)
    return tmp_path / "sums.py"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "sums.py"
    path.write_text(SOURCE)
    settings = RewardSettings(seconds=1.5, failed=-1.0)
    made = load_task(f"{path}:make", 0, workers=2, rewards=settings)
    yield made
    made.close()


def test_custom_task_splits_prompts(task):
    assert isinstance(task, Task)
    assert task.heldout_size is not None and 1 <= task.heldout_size < 10
    example = task.train(0)
    first = int(example.prompt.partition("+")[0])
    assert example == Example(f"{first}+{first}=", str(2 * first))
    assert example.record == {"answer": 2 * first, "terms": [first, first]}


def test_custom_task_weighs_components(task):
    example = task.train(0)
    right, long, wrong, bare = task.verify(
        [example] * 4, [example.answer, "0000", example.answer + "0000", "bare"]
    )
    assert (right.score, right.reason) == (1.25, "correct")
    assert right.parts == (("right", 1.0), ("short", 1.0))
    assert (long.score, long.reason) == (0.0, "wrong") == (wrong.score, wrong.reason)
    assert bare.parts == (("right", 0.0),)
    assert task.verify([example], ["7"])[0].reason == "partial"


def test_custom_task_counts_failures_by_kind(task, capsys):
    example = task.train(1)
    asked = ["raises", "waits", "nan", "text", "none", "part", example.answer]
    verdicts = task.verify([example] * len(asked), asked)
    assert [verdict.reason for verdict in verdicts] == [
        *("error", "timeout", "not_finite", "invalid", "invalid", "invalid", "correct")
    ]
    assert {verdict.score for verdict in verdicts[:-1]} == {-1.0}
    assert all(verdict.parts == () for verdict in verdicts[:-1])
    said = capsys.readouterr().err
    assert "RuntimeError: boom" in said and "verifier/error" in said
    assert said.count("warning: ") == 3  # the others are counted, and not told


def test_reward_weights_of_settings_come_first(file):
    settings = RewardSettings(weights=("short=3", "right=0.5"))
    task = load_task("sums.py:make", 0, workers=1, rewards=settings)
    example = task.train(0)
    assert task.verify([example], [example.answer])[0].score == 3.5
    task.close()
    with pytest.raises(ValueError, match=r"reward_weights names long, .*: they have right, short"):
        settings = RewardSettings(weights=("long=3",))
        load_task("sums.py:make", 0, workers=1, rewards=settings)


def test_rewards_beside_and_instead_of_own_reward(file):
    settings = RewardSettings(("task", "sums.py:length"), ("length=2",))
    task = load_task("sort", 0, workers=1, rewards=settings)
    example = task.train(0)
    right, wrong = task.verify([example] * 2, [example.answer, "1"])
    assert (right.score, right.reason) == (1 + 2 * 8 / 4, "correct")
    assert right.parts == (("task", 1.0), ("length", 2.0))
    # Accuracy is the verifier's to say, however large the sum is.
    assert (wrong.score, wrong.reason) == (0.5, "wrong")
    task.close()
    alone = load_task("sort", 0, workers=1, rewards=RewardSettings(("sums.py:length",)))
    verdict = alone.verify([alone.train(0)], ["12345678"])[0]
    assert verdict.parts == (("length", 2.0),) and verdict.score == 2.0
    alone.close()


def test_workers_keep_first_version_of_file(file):
    settings = RewardSettings(("sums.py:length",))
    task = load_task("sort", 0, workers=1, rewards=settings)
    file.write_text(SOURCE.replace("len(completion) / 4", "0"))
    for worker in task._rewards[0]._pool._workers:  # type: ignore
        worker._kill()
    assert task.verify([task.train(0)], ["1234"])[0].score == 1.0
    task.close()


def test_load_task_prefers_copy_to_original_file(file):
    files = custom_files("2 sums.py:make + sort", ("task", "sums.py:length"))
    assert files == {copy_name("sums.py"): SOURCE.encode()}
    kept = {copy_name("sums.py"): SOURCE.replace("= 30", "= 5").encode()}
    task = load_task("sums.py:make", 0, workers=1, code=kept)
    assert len(task._prompts.examples) == 5  # type: ignore
    task.close()


def test_load_task_from_module(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    assert custom_files("sums:make", ()) == {}
    task = load_task("sums:make", 0, workers=1)
    example = task.train(0)
    assert task.verify([example], [example.answer])[0].correct
    task.close()
    sys.modules.pop("sums")


DRAWN = """
class make:
    max_prompt_length, max_response_length, characters = 2, 1, "0123456789="

    def prompts(self, random):
        digit = random.randrange(10)
        return {"prompt": f"{digit}=", "answer": str(digit), "digit": digit}

    def reward(self, prompt, completion, **record):
        return completion == str(record["digit"])
"""


def test_custom_task_generates_prompts(file):
    file.write_text(DRAWN)
    task = load_task("sums.py:make", 3, workers=1, held_out="0.3")
    assert task.heldout_size is None
    train = {task.train(index).prompt for index in range(60)}
    assert train and not train & {task.heldout(index).prompt for index in range(60)}
    example = task.train(0)
    verdicts = task.verify([example] * 2, [example.answer, "x"])
    assert [(each.score, each.reason) for each in verdicts] == [(1.0, "correct"), (0.0, "wrong")]
    task.close()


@pytest.mark.parametrize("source", [SOURCE, DRAWN])
def test_custom_prompts_are_independent_of_path(tmp_path, source):
    streams = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(source)
        reference = parse_reference(f"{tmp_path / folder / 'own.py'}:make")
        prompts = custom_prompts(reference, reference.make(), 0, HeldOut())
        streams.append([prompts.train(index).prompt for index in range(20)])
    assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "make = 3",
            r"sums\.py:make does not make a task: TypeError: 'int' object is not callable",
        ),
        ("def make(): return 3", r"makes a int without prompts or reward: give it prompts, a list"),
        ("1 / 0", r"does not make a task: ZeroDivisionError: division by zero"),
        ("def other(): pass", r"does not make a task: ValueError: it has no make"),
        (DRAWN.replace("characters", "letters"), r"does not define characters: set them"),
        (
            "class make:\n  prompts = [{'prompt': 'a', 'answer': x} for x in '12']\n"
            "  def reward(self, *_): return 1",
            r"prompts\[1\]: the prompt of .*prompts\[0\] again, with another answer \('2' here",
        ),
        (
            "class make:\n  prompts = [{'prompt': 'a', 'x': b''}, 'b']\n"
            "  def reward(self, *_): return 1",
            r"""prompts\[0\]: field "x" is b'', which cannot be sent""",
        ),
        (
            "class DataFrame:\n  columns = ['prompt', 'answer']\n"
            "  __iter__ = lambda self: iter(self.columns)\n"
            "class make:\n  prompts = DataFrame()\n  def reward(self, *_): return 1",
            r"prompts is a DataFrame: give a list of records, of a DataFrame its to_dict",
        ),
        (
            "class make:\n  prompts = {'a': '1', 'b': '2'}\n  def reward(self, *_): return 1",
            r"prompts is a dict: give a list of records",
        ),
        (
            "class make:\n  prompts = [{'prompt': p, 'answer': '1'} for p in 'ab']\n"
            "  def reward(self, *_): return 1 / 0",
            r"sums\.py:make fails on the reference answer of the first prompt: ZeroDivisionError",
        ),
    ],
)
def test_load_task_refuses_custom_task(file, source, message):
    file.write_text(source)
    with pytest.raises(ValueError, match=message):
        load_task("sums.py:make", 0, workers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": ("a",)}, r"reward_weights='a' is not a weight: write NAME=NUMBER"),
        ({"weights": ("a=1", "a=2")}, r"reward_weights has 'a' twice"),
        ({"weights": ("a=nan",)}, r"reward_weights='a=nan' is not a weight"),
        ({"seconds": 0.0}, r"reward_seconds=0\.0 must be above 0"),
        ({"failed": float("inf")}, r"failed_reward=inf must be a finite number"),
        ({"rewards": ("task", "task")}, r"reward=task is given twice"),
    ],
)
def test_reward_settings_refuse_value(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardSettings(**settings)


def test_load_task_refuses_reference(file):
    with pytest.raises(ValueError, match=r"absent\.py:make: absent\.py cannot be read: No such"):
        load_task("absent.py:make", 0)
    with pytest.raises(ValueError, match=r"'sums\.py' names nothing: write path/to/file.py:name"):
        load_task("sort", 0, rewards=RewardSettings(("sums.py",)))
    with pytest.raises(ValueError, match="reward_weights=a=1 needs --reward, or a custom task"):
        load_task("sort", 0, rewards=RewardSettings(weights=("a=1",)))


def test_load_task_refuses_import_of_neighbour_and_missing_name(file):
    (file.parent / "neighbour.py").touch()
    file.write_text("import neighbour\ndef make(prompt, completion): return 1")
    beside = r"No module named 'neighbour': a run has a copy of sums\.py alone.* or install it as a"
    settings = RewardSettings(("sums.py:make",))
    for load in (
        lambda: load_task("sums.py:make", 0),
        lambda: load_task("sort", 0, workers=1, rewards=settings),
    ):
        with pytest.raises(ValueError, match=beside):
            load()
    file.write_text("import absent_library\n")
    with pytest.raises(ValueError, match=r"No module named 'absent_library'$"):
        load_task("sums.py:make", 0)
    file.write_text("def other(prompt, completion): return 1")
    with pytest.raises(ValueError, match=r"sums\.py:make fails on .*: ValueError: it has no make$"):
        load_task("sort", 0, workers=1, rewards=settings)


TOGETHER = """
import asyncio

# Opens for four at a time.
gate = asyncio.Barrier(4)


async def reward(prompt, completion):
    if completion == "never":
        await asyncio.Event().wait()
    if completion == "late":
        raise TimeoutError("of its own")
    await gate.wait()
    return len(completion)
"""


@pytest.mark.slow
def test_async_rewards_run_concurrently(tmp_path):
    """Four calls wait for each other; each has its own time limit and result."""
    path = tmp_path / "together.py"
    path.write_text(TOGETHER)
    reward = CustomReward(parse_reference(f"{path}:reward"), makes=False, seconds=0.7, workers=1)
    example = Example("?", "")
    asked = ["1", "never", "22", "late", "333", "4444"]
    found = reward.ask([(example, completion) for completion in asked])
    reward.close()
    assert [found[place] for place in (0, 2, 4, 5)] == [{"value": n} for n in (1, 2, 3, 4)]
    assert found[1] == {"failure": "timeout", "message": "no answer within 0.7 seconds"}
    assert found[3] == {"failure": "error", "message": "TimeoutError: of its own"}


SPECIAL = """
def named(prompt, completion, completion_with_special_tokens, **record):
    assert "completion_with_special_tokens" not in record
    right = completion_with_special_tokens.startswith("<think>")
    return {"right": right, "length": len(completion)}


def others(prompt, completion, **record):
    return len(record)
"""


def test_reward_gets_special_tokens_by_parameter(file):
    """Completions of equal text may differ in special tokens. A reward gets them if it names the
    parameter."""
    file.write_text(SPECIAL)
    rewards = RewardSettings(("sums.py:named", "sums.py:others"), ("others=100",))
    task = load_task("sort", 0, rewards=rewards, workers=1)
    example = task.train(0)
    text = "\ufffd4"
    written = [CompletionText(text, "<think>4"), CompletionText(text, "</think>4"), "<think>4"]
    found = [dict(verdict.parts) for verdict in task.verify([example] * 3, written)]
    task.close()
    assert [parts["right"] for parts in found] == [1.0, 0.0, 1.0]
    assert [parts["length"] for parts in found] == [2.0, 2.0, 8.0]
    assert len({parts["others"] for parts in found}) == 1
