"""Page on answers: its examples, the output of the check, and the number of cases."""

import re
import shlex
from pathlib import Path

from jrl.tasks import __main__ as command
from jrl.tasks.check import load_cases
from jrl.tasks.workers import pool

PAGE = (Path(__file__).parents[4] / "docs" / "answers.md").read_text(encoding="utf-8")
BLOCKS = [
    (title, block)
    for language, title, block in re.findall(r'(?ms)^```(\w*)(?: title="(.*?)")?\n(.*?)^```', PAGE)
    if language != "bash"
]


def test_answers_page_examples_print_as_shown(capsys):
    (_, code), (_, output) = BLOCKS[:2]
    exec(compile(code, "answers.md", "exec"), {})
    said = capsys.readouterr().out
    assert said == output
    assert len(said.splitlines()) == 20


def test_answers_page_check_prints_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pool, "default_workers", lambda: 1)
    monkeypatch.chdir(tmp_path)
    (name, source), (_, output) = BLOCKS[2:4]
    Path(name).write_text(source)
    (line,) = re.findall(r"`(jrl tasks check contains\S+)`", PAGE)
    assert command.main(shlex.split(line)[2:]) == 1
    said = capsys.readouterr().out
    shown = [part.strip("\n") for part in output.split("...\n")]
    assert all(part in said for part in shown)
    assert sum(map(len, shown)) > 500


def test_answers_page_states_number_of_cases():
    (number,) = re.findall(r"has some (\d+) more", PAGE)
    assert abs(len(load_cases()) - int(number)) < 30
