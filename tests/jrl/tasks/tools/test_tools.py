"""Calls in every form, the calculator, and the Python tool."""

import json

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.tools.calculator import CALCULATOR, calculate
from jrl.tasks.tools.calls import UNREADABLE, Call, calls_in
from jrl.tasks.tools.python import Sandbox, python_tool
from jrl.tasks.tools.tool import ToolEnvironment

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


@needs_bubblewrap
def test_the_policy_is_told_what_its_code_has():
    tool = python_tool(Sandbox(seconds=2, network=True))
    assert tool.about == "A program; it has 2 seconds and a network."
    assert tool.answer(Call("python", {"code": "print(6 * 7)"})) == "42\n"


@needs_bubblewrap
def test_limits_that_leave_nothing_to_run_are_refused():
    with pytest.raises(ValueError, match="leaves no code to run"):
        python_tool(Sandbox(memory_mb=1))


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
