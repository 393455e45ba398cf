"""Custom environments in worker processes, with a time limit per call."""

import pytest

from jrl.tasks import load_task
from jrl.tasks.mixture import environments_of, has_environments
from jrl.tasks.rewards import RewardSettings

SOURCE = '''
import asyncio, json, time


class Counting:
    """Counts what was said to it; says what goes wrong where it is told to."""

    def __init__(self, start, fault=""):
        self.count, self.fault = start, fault

    def reset(self):
        return [{"role": "user", "content": f"from {self.count}"}]

    async def step(self, message):
        await asyncio.sleep(0)
        self.count += 1
        text = message["content"]
        if text == "hang":
            time.sleep(60)
        if text == "raise":
            raise RuntimeError("no such thing")
        if text == "nan":
            return "x", float("nan"), False
        if text == "odd":
            return 3
        if text == "quiet":
            return [], 0.0, False
        return f"now {self.count}", 0.5, text == "stop"


class Task:
    prompts = [{"start": number} for number in range(6)]
    full_marks = 1.5
    tools = [{"type": "function", "function": {"name": "f"}}]

    def environment(self, start):
        return Counting(start)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "counting.py"
    path.write_text(SOURCE)
    task = load_task(f"{path}:Task", 0, workers=1, rewards=RewardSettings(seconds=0.3))
    yield task
    task.close()


def test_custom_environment_reset_opens_conversation(task):
    assert has_environments(task)
    examples = [task.train(index) for index in range(5)]
    assert {example.prompt for example in examples} <= {f"from {n}" for n in range(6)}
    assert examples[0].tools == ('{"type": "function", "function": {"name": "f"}}',)
    assert task.heldout_size == 1


def test_custom_environment_step_replies_and_names_failures(task):
    example = task.train(0)
    host = environments_of(task, example)
    assert host is not None
    start = example.record["start"]
    first = host.say(1, example, ["a"]).result()
    assert first == ((("user", f"now {start + 1}"),), 0.5, False, None)
    host.say(2, example, ["b"]).result()
    failures = {
        "hang": "timeout",
        "raise": "error",
        "nan": "not_finite",
        "odd": "invalid",
        "quiet": "invalid",
    }
    for number, (text, failure) in enumerate(failures.items(), start=10):
        assert host.say(number, example, [text]).result().failure == failure
    # The worker was ended for another's time-out, and what was said before is told again.
    assert host.say(1, example, ["a", "c"]).result().messages == (("user", f"now {start + 2}"),)
    last = host.say(1, example, ["a", "c", "stop"]).result()
    assert last.done and last.messages == (("user", f"now {start + 3}"),)
    host.end(2)


def test_scoring_verdict(task):
    scoring = task.environments.scoring
    verdicts = [scoring.verdict(rewards, None) for rewards in ([0.5] * 3, [0.5], [0.0])]
    assert [verdict.reason for verdict in verdicts] == ["correct", "partial", "wrong"]
    failed = scoring.verdict([0.5], "timeout")
    assert (failed.score, failed.reason) == (0.0, "timeout")


def test_load_task_refuses_custom_environment(tmp_path):
    path = tmp_path / "bad.py"
    source = SOURCE.replace(
        'return [{"role": "user", "content": f"from {self.count}"}]', "return []"
    )
    path.write_text(source)
    with pytest.raises(ValueError, match="has no first message: give it a prompt, or let reset"):
        load_task(f"{path}:Task", 0, workers=1)
    with pytest.raises(ValueError, match="rewarded by its environment: leave out --reward"):
        load_task("guess", 0, rewards=RewardSettings(rewards=("x.py:f",)))
