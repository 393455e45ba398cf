"""The page "Your own reward": its file trains and is evaluated as the page says."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from command_runs import FLAGS, metrics
from places import ROOT

from jrl import evaluate
from jrl.config.flags import parse_arguments
from jrl.tasks import load_task
from jrl.train import main

PAGE = (ROOT / "docs" / "rewards.md").read_text()
PATH = PAGE[: PAGE.index("\n## ")]
FILES = re.findall(r'(?ms)^```python title="(.*?)"\n(.*?)^```', PAGE)
TRAIN = re.findall(r"(?m)^jrl train (.*)$", PAGE)
EVALUATE = re.findall(r"(?m)^jrl evaluate (.*)$", PATH)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, source in FILES:
        (tmp_path / name).write_text(source)


def test_the_path_is_short():
    assert len(PATH.splitlines()) <= 42
    assert [name for name, _ in FILES] == ["mirror.py", "brevity.py", "judge.py"]


@pytest.mark.slow
def test_from_a_reward_to_a_curve(tmp_path, pictures, capsys):
    assert main([*TRAIN[0].split(), *FLAGS]) == 0
    (evaluation,) = EVALUATE
    assert evaluate.main([*evaluation.split()[:1], "--k", "2", "--prompts", "4"]) == 0
    assert "reward: letters" in capsys.readouterr().out
    run = tmp_path / "runs" / "mirror"
    assert (run / "plots" / "overview.png").is_file()
    assert all({"reward/letters", "reward/length"} <= line.keys() for line in metrics(run)[1:])
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["score"] == pytest.approx(
        sample["rewards"]["letters"] + 0.2 * sample["rewards"]["length"]
    )


def test_several_rewards():
    run = parse_arguments(TRAIN[1].split()).run
    task = load_task(run.task, run.seed, workers=1, rewards=run.rewards)
    example = task.train(0)
    (verdict,) = task.verify([example], [example.answer])
    task.close()
    assert verdict.parts == (("task", 1.0), ("brevity", -0.08))
    assert verdict.score == 1 + 0.1 * -0.08 and verdict.correct


class Grader(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose answer to every chat is 7."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "Grade the answer" in request["messages"][0]["content"]
        choice = {"index": 0, "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": "7"}
        named = {"id": "1", "object": "chat.completion", "created": 1, "model": request["model"]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**named, "choices": [choice]}).encode())

    def log_message(self, format, *args):
        """Prints nothing."""


@pytest.mark.slow
def test_a_judge_behind_a_server(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        judge = tmp_path / "judge.py"
        address = f"127.0.0.1:{server.server_port}"
        judge.write_text(judge.read_text().replace("localhost:8000", address))
        run = parse_arguments(["--task", "sort", *TRAIN[2].split()[4:]]).run
        task = load_task(run.task, run.seed, workers=1, rewards=run.rewards)
        example = task.train(0)
        (verdict,) = task.verify([example], ["any"])
        task.close()
        server.shutdown()
    assert verdict.parts == (("judge", 0.7),)
