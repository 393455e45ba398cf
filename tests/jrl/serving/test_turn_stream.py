"""Tool calls of a choice, in each format, streamed and whole."""

import json

import pytest
from scripted import House, Scripted
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.serving.api.output import Output
from jrl.serving.policy import ApiModel
from jrl.serving.transcript import Transcript
from jrl.serving.turn_stream import CallReader, TurnStream
from jrl.tasks.tools.calls import Call, parameters_by_tool
from jrl.tasks.tools.detection import FORMATS
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }
    for name, properties in (("calc", {"expression": "string"}), ("wait", {"seconds": "integer"}))
]
CALLS = [Call("calc", {"expression": "2 < 3 [or] {4}"}), Call("wait", {"seconds": 5})]
BY_NAME = {format.name: format for format in FORMATS}
ONE_CALL = {"harmony"}
"""Formats of one call a turn."""
STOP = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATES["hermes"].source)


def ended(tokenizer, text):
    return [*tokenizer.encode_special(text), tokenizer.special_tokens[STOP]]


def streamed(tokenizer, format, ids, size, **options):
    """What comes of a choice that is dealt out so many tokens at a time: texts, and calls."""
    turn = TurnStream(calls=CallReader(format, parameters_by_tool(TOOLS), **options))
    decode, ends = tokenizer.decode_special, tokenizer.stop_ids
    transcript, texts, found = Transcript(decode, ends, Output(), False), [], []
    for begin in range(0, len(ids), size):
        part, last = ids[begin : begin + size], begin + size >= len(ids)
        text, _ = transcript.add(part, [0.0] * len(part), None, last)
        delta = turn.add(text, last)
        assert last or not delta.calls
        texts.append(delta.content)
        found += delta.calls
    return texts, [(call.id, call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", BY_NAME)
def test_calls_are_parsed_in_the_format_of_the_checkpoint(name, size, tokenizer):
    format = BY_NAME[name]
    calls = CALLS[:1] if name in ONE_CALL else CALLS
    opened = "" if name == "harmony" else "Let me see.\n"
    ids = ended(tokenizer, opened + format.render(calls))
    texts, found = streamed(tokenizer, format, ids, size, first_index=3)
    if name != "harmony":
        assert "".join(texts) == "Let me see."
        if size == 1:
            assert len([text for text in texts if text]) > 5, "it came at once"
    assert [found_call[1:] for found_call in found] == [(c.name, dict(c.arguments)) for c in calls]
    assert len({identity for identity, *_ in found}) == len(calls)
    if name == "hermes":
        assert [identity for identity, *_ in found] == ["call00003", "call00004"]
    assert streamed(tokenizer, format, ids, size, parallel=False)[1] == [
        (format.call_id(calls[0].name, 0), calls[0].name, dict(calls[0].arguments))
    ]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("cut", [1, 3, 8, None])
def test_what_is_no_call_is_text(name, size, cut, tokenizer):
    """An answer, also one that begins as a call does, or that is cut off within it."""
    format = BY_NAME[name]
    mark = (*format.opening_markers, "<|channel|>")[0]
    texts = [
        "1 < 2, a [list], {3: 4} and `code`.\n",
        "<tool> [x]\n",
        f"The mark {mark} is\nno call.",
    ]
    rendered = format.render(CALLS[:1])
    if cut is not None:
        texts = [f"So: {rendered[: min(cut, len(rendered) // 3)]}"]
    for text in texts:
        ids = ended(tokenizer, text)
        found, calls = streamed(tokenizer, format, ids, size)
        assert "".join(found) == tokenizer.decode_special(ids[:-1]) and calls == []


def test_a_mark_opens_a_call_of_each_format():
    assert BY_NAME["hermes"].opening_markers == ("<tool_call>",)
    assert BY_NAME["llama"].opening_markers == ("{", "<|python_tag|>")
    assert BY_NAME["harmony"].opening_markers == ()
    for format in FORMATS:
        assert format.render(CALLS[:1]).startswith(format.opening_markers or "<|channel|>")


def served(tokenizer, says, length=4000, **options):
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer))
    engine = Scripted(2, says, tokenizer.stop_ids)
    model = ApiModel("m", format, length, None, 0, **options)
    return House(served=model, engine=engine, most_bytes=20000)


def body(**more):
    messages = [{"role": "user", "content": "What is it?"}]
    return {"model": "m", "messages": messages, "tools": TOOLS, **more}


def chunks_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_calls_are_in_openais_form(tokenizer):
    house = served(tokenizer, ended(tokenizer, "Wait.\n" + BY_NAME["hermes"].render(CALLS)))

    async def scene(client):
        post, path = client.post, "/v1/chat/completions"
        whole = await post(path, json=body())
        stream = await post(path, json=body(stream=True))
        return whole, stream, await post(path, json=body(tool_choice="none"))

    whole, stream, as_text = house.run(scene)
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Wait.")
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    functions = [call["function"] for call in message["tool_calls"]]
    assert [each["name"] for each in functions] == ["calc", "wait"]
    assert [json.loads(each["arguments"]) for each in functions] == [
        dict(call.arguments) for call in CALLS
    ]
    deltas = [chunk["choices"][0] for chunk in chunks_of(stream.text)]
    assert "".join(each["delta"].get("content", "") for each in deltas) == "Wait."
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert calls == message["tool_calls"]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    choice = as_text.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert "<tool_call>" in choice["message"]["content"]
    assert house.number('jrl_choices_total{finish="tool_calls"}') == 2


def test_a_call_alone_has_no_content(tokenizer):
    house = served(tokenizer, ended(tokenizer, BY_NAME["hermes"].render(CALLS[:1])))
    answer = house.run(lambda client: client.post("/v1/chat/completions", json=body())).json()
    assert answer["choices"][0]["message"]["content"] is None


def test_tools_and_calls_stand_in_the_prompt_as_in_training(tokenizer):
    """With ids that continue the conversation's."""
    house = served(tokenizer, ended(tokenizer, BY_NAME["hermes"].render(CALLS[1:])))
    function = {"name": "calc", "arguments": '{"expression": "1 + 2"}'}
    messages = [
        *body()["messages"],
        {"role": "assistant", "tool_calls": [{"id": "call00000", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "call00000"},
    ]
    asked = []

    async def scene(client):
        answer = await client.post("/v1/chat/completions", json=body(messages=messages))
        asked.extend(house.engine.asked)
        return answer

    submit = house.engine.submit
    prompts = []
    house.engine.submit = lambda requests: (prompts.extend(requests), submit(requests))
    answer = house.run(scene).json()
    written = tokenizer.decode_special(prompts[0].tokens.tolist())
    assert json.dumps(TOOLS[0]["function"]["name"]) in written and "1 + 2" in written
    assert "<tool_response>\n3\n</tool_response>" in written
    assert answer["choices"][0]["message"]["tool_calls"][0]["id"] == "call00001"


def test_a_template_that_shows_no_tools_is_an_error(tmp_path):
    source = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    house = served(tool_tokenizer(tmp_path, source), [0])
    answer = house.run(lambda client: client.post("/v1/chat/completions", json=body()))
    assert answer.status_code == 400
    assert "the chat template does not write tools (calc, wait)" in answer.text
