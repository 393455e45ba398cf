"""Calls in every format: a table of texts with the calls that a careful reader finds."""

import json
import time

import pytest

from jrl.tasks.tools import call_format
from jrl.tasks.tools.calls import Call
from jrl.tasks.tools.detection import FORMATS, PLAIN, detect_calls
from jrl.tasks.tools.tool import Tool


def calc(expression: str) -> str:
    """Computes."""
    return expression


def book(city: str, nights: int, rooms: list[str], breakfast: bool = False, note: str | None = ""):
    """Books a room."""


def now() -> str:
    """Says the time."""
    return "noon"


TOOLS = [Tool.of(calc), Tool.of(book), Tool.of(now)]
KNOWN = {tool.name: tool.parameters for tool in TOOLS}
ONE = ("calc", {"expression": "2*3"})
TWO = ("calc", {"expression": "7-1"})
ERROR = "error"
"""Stands for a call that was begun and cannot be read."""
BY_NAME = {format.name: format for format in (*FORMATS, PLAIN)}
BAR, GAP = "\uff5c", "\u2581"
CALLS, CALL, SEP, DONE, ALL = (
    f"<{BAR}{words.replace(' ', GAP)}{BAR}>"
    for words in (
        "tool calls begin",
        "tool call begin",
        "tool sep",
        "tool call end",
        "tool calls end",
    )
)
ARGS = '{"expression": "2*3"}'
JSON = '{"name": "calc", "arguments": {"expression": "2*3"}}'
BARE = '{"name": "calc", "parameters": {"expression": "2*3"}}'
KIMI = f"<|tool_call_begin|>functions.calc:0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>"
GLM = "<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>2*3</arg_value>\n</tool_call>"
XML = "<function=calc>\n<parameter=expression>\n2*3\n</parameter>\n</function>"
ROOM = {"city": "Ürgüp", "nights": 2, "rooms": ["a", "b"], "breakfast": True, "note": None}

TABLE = {
    "hermes": [
        (f"<tool_call>{JSON}</tool_call>", [ONE]),
        (f"<tool_call>\n{JSON}\n</tool_call>\n", [ONE]),
        (f"I compute. <tool_call>{JSON}</tool_call> Wait for it.", [ONE]),
        (f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>", [ONE, ONE]),
        (f"<tool_call>{JSON}", [ONE]),  # the end of the turn closes it
        (f"<tool_call>{JSON}<tool_call>{JSON}</tool_call>", [ONE, ONE]),
        (
            '<tool_call>{"name": "calc", "arguments": "{\\"expression\\": \\"2*3\\"}"}</tool_call>',
            [ONE],
        ),
        ('<tool_call>{"arguments": {"expression": "2*3"}, "name": "calc"}</tool_call>', [ONE]),
        (f"<tool_call>{BARE}</tool_call>", [ONE]),  # Llama's word for the same
        ('<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [("now", {})]),
        ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>', [("sum", {})]),
        (
            '<tool_call>{"name": "calc", "arguments": {"expression": "</tool_call>"}}</tool_call>',
            [("calc", {"expression": "</tool_call>"})],
        ),
        (
            '<tool_call>{"name": "calc", "arguments": {"expression": "<think>"}}</tool_call>',
            [("calc", {"expression": "<think>"})],
        ),
        (f"<tool_call>{JSON[:-1]}</tool_call>", [ERROR]),
        (f"<tool_call>{JSON}}}</tool_call>", [ERROR]),
        (f"<tool_call>{JSON} {JSON}</tool_call>", [ERROR]),
        ("<tool_call>{'name': 'calc', 'arguments': {}}</tool_call>", [ERROR]),
        ('<tool_call>{"name": "calc", "arguments": ["2*3"]}</tool_call>', [ERROR]),
        ('<tool_call>{"name": "calc", "arguments": "2*3"}</tool_call>', [ERROR]),
        ('<tool_call>{"name": "calc", "arguments": null}</tool_call>', [ERROR]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [ERROR]),
        ('<tool_call>{"tool": "calc", "arguments": {}}</tool_call>', [ERROR]),
        ("<tool_call>calc 2*3</tool_call>", [ERROR]),
        ("<tool_call>?", [ERROR]),
        ("Let me.\n<tool_call>calc 2*3", [ERROR]),
        ("<tool_call></tool_call>", [ERROR]),
        (f"<tool_call>{'[' * 4000}</tool_call>", [ERROR]),
        ('<tool_call>{"name": "calc", "arguments": ' + "[" * 100_000, [ERROR]),
        (f"<tool_call>{JSON[:-1]}</tool_call><tool_call>{JSON}</tool_call>", [ERROR, ONE]),
        ("I would write <tool_call> here, but 7 is the answer.", []),
        ("Calls stand between `<tool_call>` and `</tool_call>`.", []),
        (f"```json\n{JSON}\n```", []),
        (JSON, []),  # of a policy that has a format of its own
        (f"[TOOL_CALLS][{JSON}]", []),
        ("@calc 2*3", []),
        (f"<TOOL_CALL>{JSON}</TOOL_CALL>", []),
        (f"[THINK]<tool_call>{JSON}</tool_call>[/THINK]7", []),
        (f"<thinking><tool_call>{JSON}</tool_call></thinking>7", []),
        (f"<THINK><tool_call>{JSON}</tool_call></THINK>7", []),
        (
            f"<think>a</think><tool_call>{JSON}</tool_call><think>b</think><tool_call>{JSON}",
            [ONE, ONE],
        ),
    ],
    "glm": [
        (GLM, [ONE]),
        (GLM.replace("\n", ""), [ONE]),  # as GLM-4.7 writes it
        (f"I compute.\n{GLM}\n{GLM}", [ONE, ONE]),
        (GLM.removesuffix("</tool_call>"), [ERROR]),  # another argument might have come
        ("<tool_call>now\n</tool_call>", [("now", {})]),
        ("<tool_call>now", [ERROR]),
        ("<tool_call>\nnow\n</tool_call>", [("now", {})]),
        (
            GLM.replace("2*3", "18"),
            [("calc", {"expression": "18"})],  # a text stays one
        ),
        (
            "<tool_call>book\n<arg_key>nights</arg_key>\n<arg_value>2</arg_value>\n<arg_key>rooms"
            '</arg_key>\n<arg_value>["a"]</arg_value>\n<arg_key>breakfast</arg_key>\n<arg_value>true'
            "</arg_value>\n<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
            [("book", {"nights": 2, "rooms": ["a"], "breakfast": True, "note": None})],
        ),
        (
            "<tool_call>book\n<arg_key>nights</arg_key>\n<arg_value>two</arg_value>\n"
            "<arg_key>breakfast</arg_key>\n<arg_value>True</arg_value></tool_call>",
            [("book", {"nights": "two", "breakfast": True})],
        ),
        (GLM.replace("2*3", "</tool_call>"), [("calc", {"expression": "</tool_call>"})]),
        (GLM.replace("2*3", "1\n<think>2"), [("calc", {"expression": "1\n<think>2"})]),
        (f"<tool_call>{JSON}</tool_call>", [ERROR]),
        ("<tool_call>calc 2*3</tool_call>", [ERROR]),
        ("<tool_call>calc\n<arg_key>expression</arg_key>\n</tool_call>", [ERROR]),
        ("I would write <tool_call> here, but 7 is the answer.", []),
    ],
    "qwen-coder": [
        (f"<tool_call>\n{XML}\n</tool_call>", [ONE]),
        (XML, [ONE]),  # it forgets the tag at times, as its own parser knows
        (f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>", [ONE, ONE]),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
        (XML.replace("2*3", "18"), [("calc", {"expression": "18"})]),
        (XML.replace("2*3", "1\n\n2"), [("calc", {"expression": "1\n\n2"})]),
        (
            "<function=book>\n<parameter=nights>\n2\n</parameter>\n<parameter=rooms>\n"
            '["a"]\n</parameter>\n<parameter=breakfast>\nFalse\n</parameter>\n</function>',
            [("book", {"nights": 2, "rooms": ["a"], "breakfast": False})],
        ),
        (f"<tool_call>{JSON}</tool_call>", [ERROR]),
        ("<tool_call>\n<function=calc>\n2*3\n</function>\n</tool_call>", [ERROR]),
        ("<function=calc>\n<parameter=expression>2*3", [ERROR]),
        ("Write `<function=` to call.", []),
    ],
    "llama": [
        (BARE, [ONE]),
        (f"\n  {BARE}\n", [ONE]),
        (f"<|python_tag|>{BARE}", [ONE]),
        (f"<|python_tag|> {BARE}<|eom_id|>", [ONE]),
        (f"{BARE}<|eot_id|>", [ONE]),
        (f"{BARE}; {BARE}", [ONE, ONE]),
        (f"{BARE}\n{BARE}", [ONE, ONE]),
        (f"<|python_tag|>{BARE};{BARE}", [ONE, ONE]),
        (JSON, [ONE]),
        ('{"type": "function", "name": "calc", "parameters": {"expression": "2*3"}}', [ONE]),
        (f"I compute:\n{BARE}", [ONE]),
        ('<|python_tag|>calc.call(expression="2*3")', [ONE]),
        ("<|python_tag|>now.call()", [("now", {})]),
        ('{"name": "now", "parameters": {}}', [("now", {})]),
        ('<|python_tag|>{"name": "sum", "parameters": {}}', [("sum", {})]),
        ("<|python_tag|>print(2*3)", [ERROR]),
        ("<|python_tag|>calc.call(2*3", [ERROR]),
        (BARE[:-1], [ERROR]),
        (BARE.replace('"2*3"', "2*3"), [ERROR]),
        (BARE[:-9], [ERROR]),
        # An answer that is JSON, of whatever kind.
        ('{"name": "sum", "parameters": {}}', []),
        ('{"name": "Ann", "age": 7}', []),
        ('{"name": "calc", "age": 7}', []),
        ('{"name": "calc"}', []),
        ('{"answer": 7}', []),
        ('{"name": "calc", "parameters": "2*3"}', []),
        (f"The call {BARE} gave 6.", []),
        (f"{BARE}\nSo it is 6.", []),
        ("{x | x > 2}", []),
        ("{", []),
        (f"<tool_call>{JSON}</tool_call>", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{JSON}]", [ONE]),
        (f"[TOOL_CALLS][{JSON}]", [ONE]),
        (f"[TOOL_CALLS] [{JSON}, {JSON}]", [ONE, ONE]),
        (f"[TOOL_CALLS]{JSON}", [ONE]),
        (f"I compute.[TOOL_CALLS][{JSON}]</s>", [ONE]),
        (f'[TOOL_CALLS] [{JSON[:-1]}, "id": "a1b2c3d4e"}}]', [ONE]),
        (f"[TOOL_CALLS]calc[ARGS]{ARGS}", [ONE]),
        ("[TOOL_CALLS]x", [ERROR]),
        ("[TOOL_CALLS]", [ERROR]),
        ("[TOOL_CALLS][]", [ERROR]),
        ("[TOOL_CALLS][3]", [ERROR]),
        (f"[TOOL_CALLS][{JSON}", [ERROR]),
        (f"[THINK][TOOL_CALLS][{JSON}][/THINK]7", []),
        (f"[{JSON}]", []),
    ],
    "mistral-v11": [
        (f"[TOOL_CALLS]calc[ARGS]{ARGS}", [ONE]),
        (f"[TOOL_CALLS]calc[CALL_ID]a1b2c3d4e[ARGS]{ARGS}", [ONE]),
        (f"[TOOL_CALLS]calc{ARGS}", [ONE]),
        (f"[TOOL_CALLS]calc[ARGS]{ARGS}[TOOL_CALLS]calc[ARGS]{ARGS}", [ONE, ONE]),
        (f"[THINK]2*3[/THINK][TOOL_CALLS]calc[ARGS]{ARGS}</s>", [ONE]),
        ("[TOOL_CALLS]now[ARGS]{}", [("now", {})]),
        (f"[TOOL_CALLS][{JSON}]", [ONE]),
        (f"[TOOL_CALLS]calc[ARGS]{ARGS[:-1]}", [ERROR]),
        ("[TOOL_CALLS]calc[ARGS]", [ERROR]),
        (f"[TOOL_CALLS]calc[ARGS]{{[TOOL_CALLS]calc[ARGS]{ARGS}", [ERROR, ONE]),
        (f"[THINK][TOOL_CALLS]calc[ARGS]{ARGS}", []),
    ],
    "kimi": [
        (f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", [ONE]),
        (f"<|tool_calls_section_begin|>\n{KIMI}{KIMI}<|tool_calls_section_end|>", [ONE, ONE]),
        (KIMI, [ONE]),
        (KIMI.replace("functions.", "").replace(":0", ""), [ONE]),
        (KIMI.removesuffix("<|tool_call_end|>"), [ONE]),
        (KIMI.replace(ARGS, "2*3"), [ERROR]),
        (KIMI.replace("functions.calc:0", ""), [ERROR]),
        ("<|tool_calls_section_begin|>calc 2*3<|tool_calls_section_end|>", [ERROR]),
        (f"<think>{KIMI}</think>7", []),
    ],
    "deepseek": [
        (f"{CALLS}{CALL}function{SEP}calc\n```json\n{ARGS}\n```{DONE}{ALL}", [ONE]),
        (f"{CALLS}{CALL}calc{SEP}{ARGS}{DONE}{ALL}", [ONE]),  # as V3.1 writes it
        (
            f"{CALLS}{CALL}function{SEP}calc\n```json\n{ARGS}\n```{DONE}\n"
            f"{CALL}function{SEP}calc\n```json\n{ARGS}\n```{DONE}{ALL}",
            [ONE, ONE],
        ),
        (f"So:{CALLS}{CALL}function{SEP}now\n```json\n{{}}\n```{DONE}{ALL}", [("now", {})]),
        (f"{CALLS}{CALL}function{SEP}calc\n```json\n2*3\n```{DONE}{ALL}", [ERROR]),
        (f"{CALLS}{CALL}{ARGS}{DONE}{ALL}", [ERROR]),
        (f"{CALLS}calc", [ERROR]),
        (f"<think>{CALLS}{CALL}calc{SEP}{ARGS}{DONE}{ALL}</think>7", []),
        (f"{CALLS}{CALL}calc{SEP}{ARGS}{DONE}{ALL}</think>7", []),  # its prompts open reasoning
    ],
    "deepseek-v3.1": [
        (f"{CALLS}{CALL}calc{SEP}{ARGS}{DONE}{CALL}now{SEP}{{}}{DONE}{ALL}", [ONE, ("now", {})]),
    ],
    "harmony": [
        (
            f"<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{ARGS}<|call|>",
            [ONE],
        ),
        (f"<|channel|>commentary to=functions.calc<|message|>{ARGS}", [ONE]),
        (f" to=functions.calc<|channel|>commentary json<|message|>{ARGS}<|call|>", [ONE]),
        (
            "<|channel|>analysis<|message|>I need calc.<|end|><|start|>assistant<|channel|>"
            f"commentary to=functions.calc <|constrain|>json<|message|>{ARGS}",
            [ONE],
        ),
        (
            "<|channel|>commentary<|message|>I will compute.<|end|><|start|>assistant to="
            f"functions.calc<|channel|>commentary json<|message|>{ARGS}<|call|>",
            [ONE],
        ),
        ("<|channel|>commentary to=functions.now<|message|>", [ERROR]),
        ("<|channel|>commentary to=functions.now<|message|>{}", [("now", {})]),
        ("<|channel|>commentary to=browser.search<|message|>{}", [("browser.search", {})]),
        ("<|channel|>commentary to=functions.calc<|message|>2*3", [ERROR]),
        (f"<|channel|>commentary to=functions.calc<|message|>{ARGS[:-1]}", [ERROR]),
        ("<|channel|>commentary to=functions.calc<|message|>[1]", [ERROR]),
        (f"<|channel|>analysis to=functions.calc<|message|>{ARGS}<|end|>", []),
        ("<|channel|>analysis<|message|>commentary to=functions.calc {}<|end|>", []),
        (
            f"<|channel|>analysis<|message|>{ARGS}<|end|><|start|>assistant<|channel|>final"
            "<|message|>6",
            [],
        ),
        ("<|channel|>final<|message|>Write to=functions.calc to call.", []),
        ("<|channel|>commentary to=user<|message|>{}", []),
        ("<|channel|>analysis<|message|>never ended", []),
        ("6", []),
    ],
    "olmo": [
        ("<function_calls>\ncalc(expression='2*3')\n</function_calls>", [ONE]),
        ('<function_calls>calc(expression="2*3")</function_calls>', [ONE]),
        (
            "<function_calls>\ncalc(expression='2*3')\ncalc(expression='7-1')\n</function_calls>",
            [ONE, TWO],
        ),
        ("<function_calls>calc('2*3')</function_calls>", [ONE]),
        ("<function_calls>\ncalc(expression='2*3')\n", [ONE]),
        ("<function_calls>now()</function_calls>", [("now", {})]),
        (
            "<function_calls>book(city='Ürgüp', nights=2, rooms=['a', \"b\"], breakfast=true, "
            "note=null)</function_calls>",
            [("book", ROOM)],
        ),
        (
            "<function_calls>book('Ürgüp', 2, rooms=['a', 'b'], breakfast=True, note=None,)"
            "</function_calls>",
            [("book", ROOM)],
        ),
        (
            "<function_calls>calc(expression='a\nb\\n\\'c\\' </function_calls>')</function_calls>",
            [("calc", {"expression": "a\nb\n'c' </function_calls>"})],
        ),
        (
            '<function_calls>calc(expression="""2\n*3""")</function_calls>',
            [("calc", {"expression": "2\n*3"})],
        ),
        (
            "<function_calls>calc(expression='\\u00e9\\x41\\q')</function_calls>",
            [("calc", {"expression": "éA\\q"})],
        ),
        ("<function_calls>book(nights=-2.5e1)</function_calls>", [("book", {"nights": -25.0})]),
        ("<function_calls>calc(expression=2*3)</function_calls>", [ERROR]),
        ("<function_calls>calc(expression=x)</function_calls>", [ERROR]),
        ("<function_calls>calc(expression='2', expression='3')</function_calls>", [ERROR]),
        ("<function_calls>calc('1', '2')</function_calls>", [ERROR]),
        ("<function_calls>import os</function_calls>", [ERROR]),
        ("<function_calls>__import__('os').system('ls')</function_calls>", [ERROR]),
        ("<function_calls></function_calls>", [ERROR]),
        ("<function_calls>calc(expression='2*3'", [ERROR]),
        (f"<function_calls>calc(expression={'[' * 5000})</function_calls>", [ERROR]),
        ("Write `<function_calls>` to call.", []),
        ("calc(expression='2*3')", []),
    ],
    "python-list": [
        ('[calc(expression="2*3")]', [ONE]),
        ("Let me see.\n[calc(expression='2*3'), calc(expression='7-1')]", [ONE, TWO]),
        ("<|python_start|>[calc(expression='2*3')]<|python_end|>", [ONE]),
        ("[now()]", [("now", {})]),
        ("[calc(expression=2*3)]", [ERROR]),
        ("[calc(expression='2*3')", [ERROR]),
        ("[sum(1, 2)]", []),
        ("[calc(expression='2*3')] is what I would do.", []),
        ("[1, 2, 3]", []),
        ("[x for x in calc()]", []),
        ("[Ann (7), Ben (8)]", []),
        ("so [calc(expression='2*3')]", []),
    ],
    "tool-code": [
        ("```tool_code\ncalc(expression='2*3')\n```", [ONE]),
        ("I compute.\n```tool_code\nprint(calc(expression='2*3'))\n```\n", [ONE]),
        ("```tool_code\nprint(default_api.calc(expression='2*3'))\n```", [ONE]),
        ("```tool_code\ncalc('2*3')\ncalc('7-1')\n```", [ONE, TWO]),
        ("```tool_code\nprint(2*3)\n```", [ERROR]),
        ("```tool_code\nx = calc('2*3')\n```", [ERROR]),
        ("```tool_code\nimport os\n```", [ERROR]),
        ("```tool_code\n```", [ERROR]),
        ("```python\ncalc('2*3')\n```", []),
        ("<think>```tool_code\ncalc('2*3')\n```</think>6", []),
    ],
    "function-gemma": [
        (
            "<start_function_call>call:calc{expression:<escape>2*3<escape>}<end_function_call>",
            [ONE],
        ),
        ("<start_function_call>call:now{}<end_function_call>", [("now", {})]),
        (
            "<start_function_call>call:book{city:<escape>Ürgüp<escape>,nights:2,rooms:[<escape>a"
            "<escape>,<escape>b<escape>],breakfast:true,note:null}<end_function_call>",
            [("book", ROOM)],
        ),
        (
            "<start_function_call>call:calc{expression:<escape>{}, 'x'<escape>}",
            [("calc", {"expression": "{}, 'x'"})],
        ),
        ("<start_function_call>call:calc{expression:2*3}<end_function_call>", [ERROR]),
        ("<start_function_call>calc{}<end_function_call>", [ERROR]),
        ("<start_function_call>call:calc{expression:<escape>2*3", [ERROR]),
    ],
    "gemma-4": [
        ('<|tool_call>call:calc{expression:<|"|>2*3<|"|>}<tool_call|>', [ONE]),
        (
            '<|tool_call>call:book{breakfast:true,city:<|"|>Ürgüp<|"|>,nights:2,note:null,'
            'rooms:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
            [("book", ROOM)],
        ),
        (
            '<|tool_call>call:calc{expression:<|"|>2*3<|"|>}<tool_call|>'
            "<|tool_call>call:now{}<tool_call|>",
            [ONE, ("now", {})],
        ),
        ("<|tool_call>call:calc{expression:2*3}<tool_call|>", [ERROR]),
    ],
    "plain": [
        ("@calc 2*3", [ONE]),
        (" @calc 2*3\n", [ONE]),
        ('@calc {"expression": "2*3"}', [ONE]),
        ("@calc {2}*3", [("calc", {"expression": "{2}*3"})]),
        ('@book {"city": "Lima"}', [("book", {"city": "Lima"})]),
        ("@book Lima", [ERROR]),
        ("@sum 2", [("sum", {})]),
        ("@calc", []),
        ("6", []),
        ("I write @calc 2*3", []),
        ("ann@calc 2*3", []),
    ],
}


def read(found):
    return [ERROR if call.error else (call.name, dict(call.arguments)) for call in found]


@pytest.mark.parametrize("name", TABLE)
def test_calls_reads_table_of_format(name):
    wrong = [
        (text[:200], expected, found)
        for text, expected in TABLE[name]
        if (found := read(BY_NAME[name].calls(text, KNOWN))) != expected
    ]
    assert wrong == []


def test_table_has_every_format():
    assert set(TABLE) == set(BY_NAME)
    assert sum(map(len, TABLE.values())) >= 200
    for texts in TABLE.values():
        assert len({text for text, _ in texts}) == len(texts)


ANSWERS = (
    *("7", "", " ", "The answer is \\boxed{7}.", "3 + 4\n#### 7", "<answer>7</answer>"),
    *('{"answer": 7}', "[1, 2, 3]", "f(x) = [g(1), 2]", "```python\nprint(1)\n```", "x < y > z"),
    *("{", "[", "<", "@", "`", "\ufffd", "a@b.c", "<think>7</think>", "<think>\n7", "7</think>"),
)


@pytest.mark.parametrize("format", [*FORMATS, PLAIN], ids=lambda format: format.name)
def test_calls_ignores_answers(format):
    assert [text for text in ANSWERS if format.calls(text, KNOWN)] == []
    assert [text for text in ANSWERS if detect_calls(text, KNOWN)] == []


ASKED = [
    [Call("calc", {"expression": "2*3"})],
    [Call("now", {})],
    [Call("book", ROOM)],
    [Call("calc", {"expression": 'it\'s "so", {x}\n\té\u2028 </think> </tool_call> \\n'})],
    [Call("book", {"nights": -3, "rooms": [], "breakfast": False})],
    [Call("calc", {"expression": "18"}), Call("calc", {"expression": "true"})],
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_reads_rendered_calls(format):
    for calls in ASKED:
        text = format.render(calls)
        wanted = read(calls)
        assert read(format.calls(text, KNOWN)) == wanted
        assert read(format.calls(f"I call.\n{text}", KNOWN)) == wanted
        # Whoever does not know the format finds it.
        assert read(detect_calls(text, KNOWN)) == wanted


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_ignores_reasoning(format):
    if format.name == "harmony":  # which has channels: its part of the table
        return
    one, two = (format.render([Call(name, given)]) for name, given in (ONE, TWO))
    for opened, closed in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        assert format.calls(f"{opened}\nI might {one}{closed}\nThe answer is 7", KNOWN) == []
        assert format.calls(f"{opened}\n{one}", KNOWN) == []
        assert format.calls(f"{opened}a{closed}{opened}{one}", KNOWN) == []
        # Where the prompt has opened it.
        assert format.calls(f"I might\n{one}\n{closed}\nThe answer is 7", KNOWN) == []
        for text in (f"{opened}so\n{one}\n{closed}\n{two}", f"so\n{one}\n{closed}\n{two}"):
            assert read(format.calls(text, KNOWN)) == [TWO]
            assert read(detect_calls(text, KNOWN)) == [TWO]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_of_truncated_text_are_error_or_whole(format):
    """A text cut at any character has the whole call, an error, or no call."""
    for calls in ASKED[:4]:
        text, wanted = format.render(calls), read(calls)
        for end in range(len(text)):
            assert read(format.calls(text[:end], KNOWN)) in ([], [ERROR], wanted), text[:end]


def test_usable_id_of_policy():
    kimi, mistral = BY_NAME["kimi"], BY_NAME["mistral-v11"]
    (call,) = kimi.calls(KIMI.replace(":0", ":4"), KNOWN)
    assert call.id == "functions.calc:4" and kimi.usable_id(call.id)
    assert kimi.call_id("calc", 2) == "functions.calc:2"
    (call,) = mistral.calls(f"[TOOL_CALLS]calc[CALL_ID]a1b2c3d4e[ARGS]{ARGS}", KNOWN)
    assert call.id == "a1b2c3d4e" and mistral.usable_id(call.id)
    assert not mistral.usable_id("12") and mistral.usable_id(mistral.call_id("calc", 7))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_of_long_text_take_no_time(format):
    one = format.render([Call(*ONE)])
    pieces = ("<think>", "</think>", "<tool_call>", "{", "[", "<function=calc>", "[TOOL_CALLS]")
    begun = time.process_time()
    for text in (*(piece * 3000 for piece in pieces), one[:-8] * 500, one[:12] * 2000):
        format.calls(text, KNOWN)
    assert time.process_time() - begun < 5


REPEATED = (
    *(
        "\n",
        " ",
        "{\n",
        "{x}\n",
        '{"a":\n',
        '{"a":[\n',
        "[f(\n",
        "[calc(expression='",
        "a <tool_call> ",
    ),
    *("a <tool_call>calc<arg_key> ", "a <tool_call>calc<arg_key>k</arg_key><arg_value>"),
    *("x <function=calc><parameter=a>", "<tool_call>calc<arg_key>   ", "<|python_start|>\n"),
    *("now()\n", "[TOOL_CALLS]now  ", "<|channel|>commentary to=functions.now<|message|>{"),
    *("```tool_code\nnow(\n", "<start_function_call>call:now{a:<escape>", f"{CALL}now{SEP}{{}} "),
    *("<|python_tag|>{", '{"name": "now", "parameters": {}}\n'),
)
"""Texts that a reader might look through again at each repetition."""
BEFORE = (
    "",
    "<function_calls>\n",
    "[now()",
    "[TOOL_CALLS]now",
    KIMI[:-17] + ARGS,
    "<tool_call>now",
)


@pytest.mark.slow
@pytest.mark.parametrize("format", (*FORMATS, PLAIN), ids=lambda format: format.name)
def test_calls_of_repeated_marks_take_linear_time(format):
    """On 200,000 characters linear readers take a second or two for all texts, a quadratic one
    minutes for one."""
    begun = time.process_time()
    for repeated in REPEATED:
        for before in BEFORE:
            format.calls(before + repeated * (200_000 // len(repeated)), KNOWN)
            assert time.process_time() - begun < 120, (before, repeated)


@pytest.mark.parametrize("window", [33, 40, 64])
def test_read_value_is_independent_of_window(window, monkeypatch):
    monkeypatch.setattr(call_format, "WINDOW", window)
    values = [
        *(ONE[1], ROOM, [], {}, "a" * 100, "\\" * 40, "é\n" * 30, [1.5e300] * 20, -0.25),
        *([{"a": [True, None, False]}] * 9, {"k" * 50: {"k": "v" * 70}}, 12345678901234567890),
    ]
    for value in values:
        for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
            for before, behind in (("", ""), ("x" * 50, " and more text" * 9), ("{", "}]")):
                found = call_format.read_value(before + text + behind, len(before))
                assert found == (value, len(before) + len(text))
            for end in range(1, len(text)):
                try:
                    expected = json.JSONDecoder().raw_decode(text[:end])
                except ValueError:
                    with pytest.raises(ValueError, match="it is no JSON"):
                        call_format.read_value(text[:end], 0)
                else:
                    assert call_format.read_value(text[:end], 0) == expected
