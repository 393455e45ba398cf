"""The command `jrl chat`: flags that cannot be, and a conversation through a pipe."""

import io
import sys

import pytest
from served import write_checkpoint

from jrl.chat import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tools", "clac"], "tools='clac' must be one of calc, python."),
        (["--seed", "-1"], "seed=-1"),
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1."),
        (["--chat-template-kwargs", "x"], "chat_template_kwargs"),
    ],
)
def test_wrong_flags_are_one_line(flags, message, capsys):
    assert main(["nowhere", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_pipe_is_answered_and_seed_decides(tmp_path, monkeypatch, capsys):
    for name in ("prometheus_client", "starlette", "uvicorn", "llguidance"):  # of other extras
        monkeypatch.setitem(sys.modules, name, None)
    folder = write_checkpoint(tmp_path / "model")
    answers = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("pens?\n/clear\npens?\n"))
        flags = ["--max-tokens", "6", "--devices", "1", "--seed", seed]
        assert main([str(folder), *flags]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == second
        answers.append(first)
    assert answers[0] == answers[1] != answers[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("pens?\n"))
    assert main([str(folder), "--chat-template", "none", "--devices", "1"]) == 2
    assert "has no chat template to write messages with" in capsys.readouterr().err
