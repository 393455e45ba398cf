"""Calls in every form, the calculator, and what a sandbox lets code do."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jrl.tasks.tools.calculator import CALCULATOR, calculate
from jrl.tasks.tools.calls import UNREADABLE, Call, calls_in
from jrl.tasks.tools.python import Sandbox, python_tool
from jrl.tasks.tools.tool import ToolEnvironment
from jrl.tasks.workers import sandbox as sandbox_program

ASKED = {"name": "calc", "arguments": {"expression": "2*3"}}


@pytest.mark.parametrize(
    "text",
    [
        f"I compute.<tool_call>\n{json.dumps(ASKED)}\n</tool_call>",
        f"<tool_call>{json.dumps(ASKED)}",
        f"[TOOL_CALLS] [{json.dumps(ASKED)}]",
        '<|python_tag|>{"name": "calc", "parameters": {"expression": "2*3"}}',
        '{"name": "calc", "parameters": {"expression": "2*3"}}',
        '<tool_call>{"name": "calc", "arguments": "{\\"expression\\": \\"2*3\\"}"}</tool_call>',
        "@calc 2*3",
    ],
)
def test_calls_of_all_forms_are_read(text):
    (call,) = calls_in(text)
    assert (call.name, call.argument("expression")) == ("calc", "2*3")


def test_several_calls_and_none():
    twice = f"<tool_call>{json.dumps(ASKED)}</tool_call>" * 2
    assert calls_in(twice) == [Call("calc", {"expression": "2*3"})] * 2
    assert calls_in(f"[TOOL_CALLS]{json.dumps([ASKED, ASKED])}") == calls_in(twice)
    assert calls_in("6") == calls_in("@calc") == calls_in("a {b}") == []
    for broken in ("<tool_call>{</tool_call>", "[TOOL_CALLS]x", '{"name": 3}', "<tool_call>[" * 9):
        assert set(calls_in(broken)) <= {UNREADABLE} and calls_in(broken)


def test_the_calculator_parses_and_never_evaluates():
    assert [calculate(text) for text in ("2*3", "(1+2)/6", "7-9", "-(2)")] == [
        "6",
        "1/2",
        "-2",
        "-2",
    ]
    for text in ("", "2**3", "__import__('os')", "1e9", "9" * 199, "1/0", "x"):
        with pytest.raises(ValueError):
            calculate(text)
    with pytest.raises(ValueError, match="the call has no argument expression"):
        CALCULATOR.answer(Call("calc", {"wrong": "1"}))


def test_tools_are_called_until_an_answer_comes():
    def environment():
        return ToolEnvironment([CALCULATOR], lambda text: float(text == "6"), end=".", most=2)

    def said(text):
        return {"role": "assistant", "content": text}

    one = environment()
    assert one.step(said("@calc 2*3")) == ([{"role": "tool", "content": "6."}], 0.0, False)
    assert one.step(said("6")) == ([], 1.0, True)
    other = environment()
    answers = [other.step(said(text)) for text in ("@calc 1/0", "@sum 2", "<tool_call>?")]
    assert [messages[0]["content"] for messages, _, _ in answers] == [
        "error: division by zero.",
        "error: no tool is called sum.",
        "error: the call cannot be read.",
    ]
    brief = ToolEnvironment([CALCULATOR], lambda text: 0.0, error="no")
    assert brief.step(said("@calc 1/0"))[0][0]["content"] == "no"
    # Two turns with calls, and no third.
    assert [done for _, _, done in answers] == [False, False, True]


def test_schemas_are_those_of_chat_templates():
    function = CALCULATOR.schema["function"]
    assert function["name"] == "calc" and function["parameters"]["required"] == ["expression"]


linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@linux
def test_code_runs_within_limits():
    sandbox = Sandbox(seconds=2.0, memory_mb=256, output=50)
    try:
        sandbox.run("")
    except ValueError as refused:
        # A system that cannot take the network away says so, and what to do.
        assert "network=True" in str(refused)
        sandbox = Sandbox(seconds=2.0, memory_mb=256, output=50, network=True)
    assert sandbox.run("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in Sandbox(network=sandbox.network).run("1 / 0")
    assert sandbox.run("print('y' * 10**6)").startswith("y" * 50 + "\n(cut")
    assert "MemoryError" in Sandbox(network=sandbox.network).run("x = 'a' * 10**10")
    assert sandbox.run("import os\nprint(sorted(os.environ))") == (
        "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n"
    )
    assert sandbox.run("raise SystemExit(3)") == "(ended with status 3)"


@linux
@pytest.mark.slow
def test_code_has_no_network_and_leaves_nothing_behind(tmp_path):
    sandbox = Sandbox(seconds=1.0)
    try:
        sandbox.run("")
    except ValueError:
        pytest.skip("this system gives no namespaces")
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=0.5)"
    assert "OSError" in sandbox.run(code) or "unreachable" in sandbox.run(code)
    assert "stopped after 1 seconds" in sandbox.run("while True: pass")
    mark = tmp_path / "mark"
    left = (
        "import subprocess, sys\n"
        f"code = 'import time; time.sleep(2); open({str(mark)!r}, \"w\")'\n"
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    )
    sandbox.run(left)
    time.sleep(2.5)
    assert not mark.exists()


def test_the_policy_is_told_what_its_code_has():
    about = python_tool(Sandbox(seconds=2, network=True)).about
    assert about == "A program; it has 2 seconds and a network."


@linux
def test_code_ends_with_whoever_waits_for_it():
    """An interrupt, and a process that is killed."""

    def interrupted(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            Sandbox(seconds=61.0, network=True).run("import time; time.sleep(60)")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not running('{"seconds": 61.0')

    settings = '{"seconds": 62.0, "memory": 500000000, "file": 1000, "network": true}'
    waits = (
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-I', *sys.argv[1:]]\n"
        "code = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "code.communicate(b'import time; print(1, flush=True); time.sleep(60)')\n"
    )
    command = [sys.executable, "-c", waits, sandbox_program.__file__, settings]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout.read(1) == b"1"
    assert running('{"seconds": 62.0') == 3  # the waiting one, what limits the code, and the code
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 30
    while running('{"seconds": 62.0'):
        assert time.monotonic() < end, "the code goes on"
        time.sleep(0.01)


def running(argument):
    """Processes with an argument that begins like this."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += f"\0{argument}" in path.read_text(errors="replace")
    return found


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("so it is 7", "so it is 7"),
        (" 7\n", "7"),
        ("<think>3?</think>\n7", "7"),
        (r"hence $\boxed{7}$.", "7"),
        ("<answer>7</answer>", "7"),
        ("3 + 4\n#### 7", "7"),
        ("<think>7", None),
    ],
)
def test_the_score_is_given_the_answer(text, given):
    scored = []
    environment = ToolEnvironment([], lambda answer: float(bool(scored.append(answer))) + 1.0)
    messages, score, done = environment.step({"content": text})
    assert (messages, done) == ([], True)
    assert scored == ([] if given is None else [given])
    assert score == (0.0 if given is None else 1.0)
