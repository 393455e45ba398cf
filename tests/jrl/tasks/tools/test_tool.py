"""Tools of typed functions, checks of their arguments, and the environment that calls them."""

import asyncio
import functools
import json
import re
from typing import Any, Literal, Optional

import pytest

from jrl.tasks.answers import extract
from jrl.tasks.tools.calculator import CALCULATOR
from jrl.tasks.tools.calls import Call, format_message_calls
from jrl.tasks.tools.tool import TRUNCATED_MESSAGE, Tool, ToolEnvironment
from jrl.tasks.workers.user_code import Conversations


def book(
    city: str,
    nights: int,
    price: float = 80.0,
    rooms: list[str] | None = None,
    board: Literal["none", "half", "full"] = "none",
    *,
    smoking: bool = False,
    extras: dict[str, int] = {},  # noqa: B006
    code: int | str | None = None,
    note: Optional[str] = None,  # noqa: UP045
    anything: Any = 0,
):
    """Books a room
    in a hotel.

    It takes a while.

    Args:
      city: where it is,
        by its name
      nights (int): how many: at least one

    Returns:
      what: was booked
    """
    return {"city": city, "nights": nights, "price": price, "rooms": rooms, "board": board}


BOOK = Tool.of(book)


def test_tool_of_function_has_schema():
    function = BOOK.schema["function"]
    assert (function["name"], function["description"]) == ("book", "Books a room in a hotel.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where it is, by its name"},
            "nights": {"type": "integer", "description": "how many: at least one"},
            "price": {"type": "number", "default": 80.0},
            "rooms": {"type": "array", "items": {"type": "string"}, "nullable": True},
            "board": {"type": "string", "enum": ["none", "half", "full"], "default": "none"},
            "smoking": {"type": "boolean", "default": False},
            "extras": {
                "type": "object",
                "additionalProperties": {"type": "integer"},
                "default": {},
            },
            "code": {"type": ["integer", "string"], "nullable": True},
            "note": {"type": "string", "nullable": True},
            "anything": {"default": 0},
        },
        "required": ["city", "nights"],
    }
    json.dumps(BOOK.schema)


def test_tool_of_function_with_other_descriptions():
    def add(a: int, b: int) -> int:
        """Adds.

        :param a: the one
        :param int b: the other
        """
        return a + b

    properties = Tool.of(add).parameters["properties"]
    assert [each["description"] for each in properties.values()] == ["the one", "the other"]
    other = Tool.of(add, name="plus", description="Sums.", about={"b": "more"})
    assert (other.name, other.description) == ("plus", "Sums.")
    assert other.parameters["properties"]["b"]["description"] == "more"
    bare = Tool.of(lambda: "x", name="x")
    assert (bare.description, bare.parameters["properties"]) == ("", {})
    assert bare.call({}) == "x"


class Counter:
    """Counts what it is given."""

    def __init__(self):
        self.count = 0

    def add(self, number: int) -> int:
        """Adds a number."""
        self.count += number
        return self.count

    def __call__(self, number: int) -> int:
        return self.add(number)


def test_tool_of_method_and_callable_object():
    counter = Counter()
    method = Tool.of(counter.add)
    assert (method.name, list(method.parameters["properties"])) == ("add", ["number"])
    assert method.call({"number": 2}) == 2 and method.call({"number": 2}) == 4
    object_ = Tool.of(counter, name="count")
    assert object_.description == "Counts what it is given."
    assert object_.call({"number": 3}) == 7


def _typed(annotation):
    def tool(x):
        return x

    tool.__annotations__ = {"x": annotation}
    return tool


def _untyped(x):
    return x


def _many(*x: int):
    return x


def _placed(x: int, /):
    return x


def _far(x: int = float("inf")):  # pyright: ignore[reportArgumentType]
    return x


@pytest.mark.parametrize(
    ("function", "about", "message"),
    [
        (_untyped, {}, "the tool _untyped: the argument x has no type: annotate it with one of"),
        (_many, {}, "the tool _many: the argument x stands for any number of them"),
        (_placed, {}, "the argument x cannot be given by its name: leave out the /"),
        (_far, {}, "the argument x has the default inf, which no JSON holds"),
        (_typed(complex), {}, "the argument x has the type complex: a call is JSON, so use str"),
        (_typed(list[bytes]), {}, "the argument x has the type bytes"),
        (_typed(dict[int, str]), {}, "the argument x has the type dict"),
        (_typed(Literal[b"x"]), {}, "the argument x has the type"),
        (_typed(int), {"y": "more"}, "the tool tool has no argument y: it has x"),
    ],
)
def test_tool_of_refuses_function(function, about, message):
    with pytest.raises(ValueError, match=message):
        Tool.of(function, about=about)


GIVEN = {"city": "Lima", "nights": 2}


def typed(annotation, value):
    """Value and type that a function gets for an argument."""
    found = Tool.of(_typed(annotation)).call({"x": value})
    return found, type(found)


@pytest.mark.parametrize(
    ("annotation", "value", "found"),
    [
        (str, "", ""),
        (int, 3, 3),
        (int, 3.0, 3),
        (int, -(10**30), -(10**30)),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (bool, True, True),
        (list, [1, "a"], [1, "a"]),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (list[list[int]], [[1.0], []], [[1], []]),
        (dict, {"a": 1}, {"a": 1}),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 2, 2),
        (int | None, None, None),
        (int | str, "a", "a"),
        (int | str, 4, 4),
        (int | float, 4, 4),
        (list[int] | str, [1.0], [1]),
        (Any, None, None),
    ],
)
def test_tool_call_converts_value(annotation, value, found):
    assert typed(annotation, value) == (found, type(found))


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (str, 3, "the argument x is 3, which is not a string"),
        (str, None, "the argument x is null, which is not a string"),
        (int, "3", 'the argument x is "3", which is not an integer'),
        (int, 3.5, "the argument x is 3.5, which is not an integer"),
        (int, True, "the argument x is true, which is not an integer"),
        (float, "3", 'the argument x is "3", which is not a number'),
        (float, float("nan"), "the argument x is NaN, which is not a number"),
        (float, 10**400, "the argument x is too large"),
        (bool, 1, "the argument x is 1, which is not true or false"),
        (bool, "true", 'the argument x is "true", which is not true or false'),
        (list[int], [1, "a"], r'the argument x\[1\] is "a", which is not an integer'),
        (list[int], "1, 2", "which is not a list"),
        (dict[str, int], {"a": "b"}, r'the argument x.a is "b", which is not an integer'),
        (dict[str, int], {"a b": "b"}, r'the argument x."a b" is "b"'),
        (Literal["a", "b"], "c", 'the argument x is "c", which is none of "a", "b"'),
        (Literal[1, 2], True, "the argument x is true, which is not an integer"),
        (int | None, "x", "which is not an integer or null"),
        (int | str, [], r"the argument x is \[\], which is not an integer or a string"),
        (list[int] | str, 3, "the argument x is 3, which is not a list or a string"),
        (list[int] | dict[str, int], ["a"], r'the argument x\[0\] is "a"'),
        (str, ["y" * 500], "^.{0,120}$"),
    ],
)
def test_tool_call_refuses_value_in_one_line(annotation, value, message):
    with pytest.raises(ValueError, match=message) as told:
        Tool.of(_typed(annotation)).call({"x": value})
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nights": 2}, "book needs the argument city"),
        ({**GIVEN, "town": "x"}, "book has no argument town: it has city, nights, price, rooms"),
        ({**GIVEN, "a\nb": "x"}, r'book has no argument "a\nb": it has city'),
    ],
)
def test_tool_call_refuses_missing_or_unknown_argument(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BOOK.call(arguments)
    with pytest.raises(ValueError, match="x has no argument y: it has none"):
        Tool.of(lambda: 0, name="x").call({"y": 1})


def test_tool_with_custom_schema():
    parameters = {
        "type": "object",
        "properties": {
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "kind": {"const": "point"},
            "odd": {"type": "date", "format": "date"},
        },
        "required": ["at"],
    }
    tool = Tool("move", "Moves.", parameters, lambda **given: given)
    assert tool.call({"at": {"x": 1.0}, "odd": "today"}) == {"at": {"x": 1}, "odd": "today"}
    for given, message in (
        ({"at": {}}, "the argument at lacks x"),
        ({"at": {"x": 1, "y": 2}}, "the argument at has y, which it may not"),
        ({"at": {"x": 1}, "kind": "line"}, 'the argument kind is "line", which is none of "point"'),
    ):
        with pytest.raises(ValueError, match=message):
            tool.call(given)
    free = Tool("any", "Takes anything.", {"type": "object"}, lambda **given: given)
    assert free.call({"a": [1]}) == {"a": [1]}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def answers(environment, *texts):
    """Contents of the tools' answers to each turn."""
    return [[m["content"] for m in environment.step(said(text))[0]] for text in texts]


def hermes(*calls):
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
        for name, given in calls
    )


def test_tool_environment_answers_calls_until_final_answer():
    def environment():
        return ToolEnvironment([CALCULATOR], lambda text: float(text == "6"), end=".", most=2)

    one = environment()
    assert one.step(said("@calc 2*3")) == ([{"role": "tool", "content": "6."}], 0.0, False)
    assert one.step(said("6")) == ([], 1.0, True)
    other = environment()
    stepped = [step(other, said(text)) for text in ("@calc 1/0", "@sum 2", "<tool_call>?")]
    assert [messages[0]["content"] for messages, _, _ in stepped] == [
        "error: division by zero.",
        "error: no tool is called sum; there are: calc.",
        "error: the call cannot be read: it is no JSON object with a name and arguments.",
    ]
    # Two turns with calls, and no third.
    assert [done for _, _, done in stepped] == [False, False, True]
    brief = ToolEnvironment([CALCULATOR], lambda text: 0.0, error="no")
    assert answers(brief, "@calc 1/0") == [["no"]]


def test_tool_environment_ignores_calls_in_reasoning():
    ran = []

    def shell(q: str) -> str:
        ran.append(q)
        return q

    def environment():
        return ToolEnvironment([Tool.of(shell)], lambda text: float(text == "The answer is 7"))

    rm, ls = (hermes(("shell", {"q": q})) for q in ("rm", "ls"))
    assert answers(environment(), f"<think>so {rm}</think>{ls}") == [["ls"]]
    final = f"<think>I might call {rm} but no.</think>\nThe answer is 7"
    assert environment().step(said(final)) == ([], 1.0, True)
    assert environment().step(said(f"<think>I call {rm}")) == ([], 0.0, True)
    assert ran == ["ls"]


def test_tool_environment_reports_wrong_arguments():
    environment = ToolEnvironment([BOOK], lambda text: 1.0)
    found = answers(
        environment,
        hermes(("book", {"city": "Lima"}), ("book", {"city": "Lima", "nights": "two"})),
        hermes(("book", {"city": "Lima", "nights": 2, "board": "half", "rooms": ["a"]})),
    )
    assert found[0] == [
        "error: book needs the argument nights",
        'error: the argument nights is "two", which is not an integer',
    ]
    assert json.loads(found[1][0]) == {**GIVEN, "price": 80.0, "rooms": ["a"], "board": "half"}


def test_tool_environment_writes_results_as_text():
    def give(kind: str):
        given = {"text": "é", "number": 0.5, "none": None, "list": [1, "é"], "odd": {1}}
        return given[kind]

    environment = ToolEnvironment([Tool.of(give)], lambda text: 0.0, most=9)
    kinds = ("text", "number", "none", "list", "odd")
    found = answers(environment, *(hermes(("give", {"kind": kind})) for kind in kinds))
    assert [text for (text,) in found] == ["é", "0.5", "null", '[1, "é"]', '"{1}"']


def fail(kind: str):
    if kind == "divide":
        return 1 / 0
    if kind == "look":
        return {}["x"]
    if kind == "value":
        raise ValueError("so not")
    raise RuntimeError("a fault")


def test_tool_environment_reports_errors_of_values_only():
    environment = ToolEnvironment([Tool.of(fail)], lambda text: 0.0)
    kinds = ("divide", "look", "value")
    assert answers(environment, *(hermes(("fail", {"kind": kind})) for kind in kinds)) == [
        ["error: ZeroDivisionError: division by zero"],
        ["error: KeyError: 'x'"],
        ["error: so not"],
    ]
    with pytest.raises(RuntimeError, match="a fault"):
        environment.step(said(hermes(("fail", {"kind": "other"}))))


def test_tool_environment_awaits_async_tools():
    order = []

    async def wait(name: str, fail: bool = False) -> str:
        order.append(f"{name} begins")
        await asyncio.sleep(0)
        order.append(f"{name} ends")
        if fail:
            raise ValueError("no")
        return name

    def note(name: str) -> str:
        order.append(name)
        return name

    tools = [Tool.of(wait), Tool.of(note), Tool.of(functools.partial(wait, fail=True), name="bad")]
    assert list(tools[2].parameters["properties"]) == ["name", "fail"]
    environment = ToolEnvironment(tools, lambda text: 1.0)
    calls = [(kind, {"name": str(n)}) for n, kind in enumerate(("note", "wait", "note", "bad"))]
    # As in a worker process, which waits for what a step gives.
    conversations = Conversations(lambda fields: environment, lambda x: asyncio.run(_awaited(x)))
    found = conversations.answer(1, {}, [hermes(*calls)])
    assert [content for _, content in found["messages"]] == ["0", "1", "2", "error: no"]
    # One after the other.
    assert order == ["0", "1 begins", "1 ends", "2", "3 begins", "3 ends"]
    assert conversations.answer(1, {}, [hermes(*calls), "6"])["done"]


def step(environment, message):
    """The result of a step, which no async tool delays."""
    found = environment.step(message)
    assert isinstance(found, tuple)
    return found


async def _awaited(value):
    return await value


def test_tool_environment_takes_parsed_calls():
    environment = ToolEnvironment([CALCULATOR], lambda text: float("calc" in text), most=9)
    calls = format_message_calls([Call("calc", {"expression": "2*3"})], ["x"])
    message = said("text that says nothing", tool_calls=calls)
    assert step(environment, message)[0] == [{"role": "tool", "content": "6"}]
    broken = format_message_calls([Call("", error="the call cannot be read: so")], ["x"])
    assert step(environment, said("", tool_calls=broken))[0][0]["content"] == (
        "error: the call cannot be read: so"
    )
    # What another format would take for a call is the answer then.
    text = hermes(("calc", {"expression": "1"}))
    assert environment.step(said(text, tool_calls=[])) == ([], 1.0, True)


def test_tool_environment_replies_to_truncated_turn():
    scored = []

    def environment():
        score = functools.partial(_scored, scored)
        return ToolEnvironment([CALCULATOR], score, end=".", most=1)

    told = ([{"role": "user", "content": f"error: {TRUNCATED_MESSAGE}."}], 0.0, False)
    for text in ("I think that", "<think>It is", "so it is 7", "<tool_call>{"):
        assert environment().step(said(text, truncated=True)) == told
    assert scored == []
    # A call that is whole is carried out, and an answer that is marked counts.
    whole = hermes(("calc", {"expression": "2*3"})) + '<tool_call>{"name'
    assert step(environment(), said(whole, truncated=True))[0] == [
        {"role": "tool", "content": "6."}
    ]
    assert environment().step(said(r"so \boxed{7}. And", truncated=True)) == ([], 1.0, True)
    assert scored == ["7"]
    # It is a turn like those that call.
    twice = environment()
    assert [step(twice, said("I", truncated=True))[2] for _ in range(2)] == [False, True]


def _scored(scored, text):
    scored.append(text)
    return 1.0


def test_tool_environment_refuses_equal_names():
    with pytest.raises(ValueError, match="two tools are called calc: give one of them another"):
        ToolEnvironment([CALCULATOR, CALCULATOR], lambda text: 0.0)


@pytest.mark.parametrize(
    ("text", "given"),
    [("<think>3?</think>\n7", "7"), (r"hence $\boxed{7}$.", "7"), ("<think>7", None)],
)
def test_tool_environment_scores_extracted_answer(text, given):
    scored = []
    environment = ToolEnvironment([], functools.partial(_scored, scored))
    messages, score, done = step(environment, said(text))
    assert (messages, done) == ([], True)
    assert scored == ([] if given is None else [given])
    assert score == (0.0 if given is None else 1.0)
    assert (extract(text) is None) == (given is None)


def test_tool_environment_replaces_lone_surrogates():
    """JSON may escape half a character, and tokenizers reject it."""

    def echo(text: str, number: int = 0) -> str:
        return text

    environment = ToolEnvironment([Tool.of(echo)], lambda text: 0.0)
    conversations = Conversations(lambda fields: environment, lambda x: asyncio.run(_awaited(x)))
    calls = hermes(("echo", {"text": "a\ud800"}), ("echo", {"text": "", "number": "\udfff"}))
    found = conversations.answer(1, {}, [calls])
    assert [content for _, content in found["messages"]] == [
        "a\ufffd",
        'error: the argument number is "\ufffd", which is not an integer',
    ]
