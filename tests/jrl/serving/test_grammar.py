"""Choices that a grammar constrains: whatever is sampled of the tokens that it allows fits."""

import json
import re

import numpy as np
import pytest
from chat_checkpoint import chat_tokenizer
from scripted import House, Scripted
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.serving import grammar as grammars
from jrl.serving.api.structured import TextRule
from jrl.serving.api.tools import ToolUse
from jrl.serving.grammar import GrammarCompiler
from jrl.serving.policy import ApiModel
from jrl.tasks.tools.detection import FORMATS
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat, special_text_of

needs_library = pytest.mark.usefixtures("library")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Lima", "São Paulo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON = TextRule("json", "response_format", SCHEMA)
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("forecast", SCHEMA), ("now", {}))
)


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("llguidance", reason="needs .[grammar]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("grammar"), TEMPLATES["hermes"].source)


def walk(grammar, tokenizer, seed, most=600):
    """Tokens that a policy of random logits samples, to the end; likelier shorter ones end."""
    constraint, draw, ids = grammar.start(), np.random.default_rng(seed), []
    while not ids or ids[-1] not in tokenizer.stop_ids:
        bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
        (allowed,) = np.nonzero(bits)
        assert len(allowed) and allowed[-1] < tokenizer.vocab_size
        ends = [token for token in allowed if token in tokenizer.stop_ids]
        ids.append(int(draw.choice(ends or allowed)))
        constraint.accept(ids[-1:])
        assert len(ids) < most
    return ids


@needs_library
@pytest.mark.parametrize("kind", ["bytes", "merges"])
def test_json_fits_its_schema(kind, tokenizer, tmp_path):
    made = tokenizer if kind == "bytes" else chat_tokenizer(tmp_path)
    grammar = GrammarCompiler(made).compile(JSON, None, None)
    found = [json.loads(made.decode(walk(grammar, made, seed))) for seed in range(12)]
    for each in found:
        assert each.keys() == {"city", "days"} and 0 <= each["days"] <= 20
    assert {each["city"] for each in found} == {"Lima", "São Paulo"}
    # A choice has a constraint of its own.
    assert not np.array_equal(walk(grammar, made, 0), walk(grammar, made, 1))


NUMBER = r"-?[0-9]{1,3}/[1-9]|a\\/b\nc"


@needs_library
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", NUMBER, NUMBER),
        ("choice", ("yes", 'no "way"\n', "na\u00efve /x/"), 'yes|no "way"\n|na\u00efve /x/'),
        ("grammar", 'start: "a" number+\nnumber: /[0-9]/ ";"', "a([0-9];)+"),
    ],
)
def test_texts_follow_their_rule(kind, value, pattern, tokenizer):
    grammar = GrammarCompiler(tokenizer).compile(
        TextRule(kind, f"guided_{kind}", value), None, None
    )
    texts = {tokenizer.decode(walk(grammar, tokenizer, seed)) for seed in range(12)}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1 or kind == "grammar"


@needs_library
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": "start: /a/", "tools": list(TOOLS)}, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(given, param, tokenizer):
    answer = answer_to(served(tokenizer), **given)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@needs_library
@pytest.mark.parametrize("name", [format.name for format in FORMATS])
def test_a_tool_that_must_be_called_is(name, tokenizer):
    format = next(each for each in FORMATS if each.name == name)
    compiler, found = GrammarCompiler(tokenizer), []
    in_json = '{"probe": 1}' in format.render([grammars.Call("x", grammars.ARGUMENTS)])
    for seed in range(6 if in_json else 0):
        tools = ToolUse(TOOLS, "required", "forecast" if seed % 2 else None)
        grammar = compiler.compile(None, tools, format)
        text = special_text_of(tokenizer, np.array(walk(grammar, tokenizer, seed), np.int32))
        (call,) = format.calls(text, tools.parameters)
        assert not call.error and call.name in tools.parameters
        if call.name == "forecast":
            assert call.arguments.keys() == {"city", "days"}
        found.append(call.name)
    if in_json:
        assert set(found[1::2]) == {"forecast"}
    else:
        # Arguments that are no JSON: what comes first is the call, and the rest is free.
        tools = ToolUse(TOOLS, "required", "now")
        ids = walk(compiler.compile(None, tools, format), tokenizer, 0)
        text = special_text_of(tokenizer, np.array(ids, np.int32))
        assert format.render([grammars.Call("now", {})]).startswith(text)
        assert "now" in text


OPEN = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}


@needs_library
@pytest.mark.parametrize(
    "parameters", [OPEN, {"type": "object", "properties": {}}, {"properties": {}, "title": "Now"}]
)
def test_a_call_has_the_arguments_that_its_schema_names(parameters, tokenizer):
    format = next(each for each in FORMATS if each.name == "hermes")
    function = {"name": "tool", "parameters": parameters}
    tools = ToolUse(({"type": "function", "function": function},), "required")
    grammar = GrammarCompiler(tokenizer).compile(None, tools, format)
    for seed in range(4):
        ids = walk(grammar, tokenizer, seed)
        text = special_text_of(tokenizer, np.array(ids, np.int32))
        (call,) = format.calls(text, tools.parameters)
        assert not call.error and call.arguments.keys() == parameters["properties"].keys()


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"patternProperties": {}}, {"anyOf": [{}]}]
)
def test_a_schema_that_says_what_else_there_may_be_is_as_it_is(more, tokenizer):
    format = next(each for each in FORMATS if each.name == "hermes")
    parameters = {"type": "object", "properties": {}, **more}
    rule = grammars.call_rule(format, tokenizer, "tool", parameters)
    assert grammars.json_rule(parameters, grammars.ONE_LINE) in rule


@needs_library
def test_json_or_a_call_where_both_may_be(tokenizer):
    format = next(each for each in FORMATS if each.name == "hermes")
    tools = ToolUse(TOOLS[:1], "auto")
    grammar = GrammarCompiler(tokenizer).compile(JSON, tools, format)
    texts = [tokenizer.decode(walk(grammar, tokenizer, seed)) for seed in range(16)]
    calls = [text for text in texts if text.startswith("<tool_call>")]
    assert 0 < len(calls) < len(texts)
    assert {json.loads(text)["city"] for text in texts if text not in calls}


def served(tokenizer, engine=None):
    model = ApiModel("m", PromptFormat(tokenizer, ChatTemplate(tokenizer)), 4000, None, 0)
    return House(served=model, engine=engine, most_bytes=20000)


def answer_to(house, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2, **more}
    return house.run(lambda client: client.post("/v1/chat/completions", json=body))


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@needs_library
@pytest.mark.parametrize("response_format", [{"type": "json_object"}, schema_of(SCHEMA)])
def test_a_request_brings_its_grammar_to_the_engine(response_format, tokenizer):
    house, asked = served(tokenizer), []
    submit = house.engine.submit
    house.engine.submit = lambda requests: (asked.extend(requests), submit(requests))
    assert answer_to(house, response_format=response_format, n=2, top_k=3).status_code == 200
    first, second = (request.constraint for request in asked)
    assert first is not second and asked[0].sampling.adjustments.top_k == 3
    bits = np.unpackbits(first.allowed().view(np.uint8), bitorder="little")
    assert [tokenizer.decode([token]) for token in np.flatnonzero(bits)] == ["{"]


@needs_library
@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"$ref": "http://localhost/x"}])
def test_a_schema_that_cannot_be_is_refused(schema, tokenizer):
    error = answer_to(served(tokenizer), response_format=schema_of(schema)).json()["error"]
    assert error["param"] == "response_format"
    assert "schema that is not supported" in error["message"]
    function = {"name": "a", "parameters": {"properties": {"x": schema}}}
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert answer_to(served(tokenizer), **more).json()["error"]["param"] == "tools"


def test_without_the_library_the_command_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    for more, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": list(TOOLS), "tool_choice": "required"}, "tool_choice"),
    ):
        answer = answer_to(served(tokenizer), **more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert 'pip install -e ".[grammar]"' in answer.json()["error"]["message"]
    assert answer_to(served(tokenizer), response_format={"type": "text"}).status_code == 200


def optional(number, prefix=""):
    return {"type": "object", "properties": {f"{prefix}{n}": {} for n in range(number)}}


@needs_library
def test_an_object_may_have_as_many_optional_properties_as_are_allowed(tokenizer):
    rule = TextRule("json", "guided_json", optional(grammars.MAX_PROPERTIES))
    constraint = GrammarCompiler(tokenizer).compile(rule, None, None).start()
    constraint.accept(tokenizer.encode('{"0": 1, "7": '))
    assert constraint.failure is None and allows(constraint, tokenizer, "4")


def allows(constraint, tokenizer, text):
    bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
    return bool(bits[tokenizer.encode(text)[0]])


@needs_library
@pytest.mark.parametrize("more", [{"min_tokens": 3, "n": 2}, {"stream": True}])
def test_a_grammar_that_fails_in_a_row_is_an_error(more, tokenizer):
    """A limit of the library that only a generated text reaches."""
    schema = {"allOf": [optional(450, prefix) for prefix in "abc"]}
    engine = Scripted(2, [*tokenizer.encode("{{{{{{"), *tokenizer.stop_ids], tokenizer.stop_ids)
    stream, given = engine.stream, dict(guided_json=schema, max_tokens=5, **more)

    def constrained(window):
        chunks = stream(1)
        for chunk in chunks:
            chunk.accept()
        return chunks

    engine.stream = constrained
    answer = answer_to(served(tokenizer, engine), **given)
    assert "guided_json has a grammar that exceeds a limit" in answer.text
    assert answer.status_code == (200 if "stream" in more else 400)


@needs_library
def test_blanks_are_bounded(tokenizer):
    """A policy that likes them best writes as few as an indentation has."""
    constraint = GrammarCompiler(tokenizer).compile(JSON, None, None).start()
    for text, more in (("{\n" + 32 * " ", True), (" ", False), ('"city": "Lima"', True)):
        for token in tokenizer.encode(text):
            bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
            assert bool(bits[token]) == more
            if more:
                constraint.accept([token])
