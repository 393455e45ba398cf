"""Turns of reasoning checkpoints through the endpoints: answer, reasoning and calls, streamed and
whole."""

import json
import random

import pytest
import tokenizers
from chat_checkpoint import TEMPLATE
from scripted import House, Scripted
from tool_templates import TEMPLATES, VOCAB_SIZE, tool_tokenizer

from jrl.serving.api.output import Output
from jrl.serving.policy import ApiModel
from jrl.serving.transcript import Transcript
from jrl.serving.turn_stream import CallReader, TurnStream
from jrl.tasks.answers.reasoning import CHANNEL, PAIRS, REASONING
from jrl.tasks.tools.calls import Call, parameters_by_tool
from jrl.tasks.tools.detection import FORMATS
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.prompt_format import PromptFormat

NEXT = "<|end|><|start|>assistant"
HARMONY = (
    f"<|channel|>analysis<|message|>2+2 is 4.{NEXT}<|channel|>final<|message|>It is 4.<|return|>"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
CALL = Call("f", {"x": 1})
HERMES = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("turns"), TEMPLATES["hermes"].source)


def answers(tokenizer, says, **body):
    """The message of a whole answer, and of a stream put together, with their ends."""
    ids = tokenizer.encode_special(says)
    if ids[-1] not in tokenizer.stop_ids:
        ids.append(tokenizer.special_tokens["<|im_end|>"])
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer))
    engine = Scripted(2, ids, tokenizer.stop_ids)
    house = House(served=ApiModel("m", format, 4000, None, 0), engine=engine, most_bytes=9000)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], **body}

    async def scene(client):
        whole = await client.post("/v1/chat/completions", json=body)
        return whole, await client.post("/v1/chat/completions", json={**body, "stream": True})

    whole, stream = house.run(scene)
    chunks = [
        json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")
    ]
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        for name in streamed:
            streamed[name] += choice["delta"].get(name, type(streamed[name])())
    for call in streamed["tool_calls"]:
        del call["index"]
    choice = whole.json()["choices"][0]
    message = {name: choice["message"].get(name) or type(streamed[name])() for name in streamed}
    assert streamed == message and choices[-1]["finish_reason"] == choice["finish_reason"]
    return message


@pytest.mark.parametrize(
    ("says", "body", "reasoning", "content", "calls"),
    [
        (HARMONY, {}, "2+2 is 4.", "It is 4.", 0),
        (HARMONY, {"include_reasoning": False}, "", "It is 4.", 0),
        ("<|channel|>final<|message|>It is 4.<|return|>", {}, "", "It is 4.", 0),
        ("<think>\na\n</think>\n\n4", {}, "a", "4", 0),
        ("<think>unfinished", {}, "unfinished", "", 0),
        ("Plain.", {}, "", "Plain.", 0),
        (f"<think>a</think>\nb\n{HERMES}", {"tools": [TOOL]}, "a", "b", 1),
        (f"Use `<tool_call>` tags {HERMES}", {"tools": [TOOL]}, "", "Use `<tool_call>` tags", 1),
        (f"a\n{HERMES}\nb\n{HERMES} c", {"tools": [TOOL]}, "", "a\nb\nc", 2),
        (f"a {HERMES}<think>b</think>", {"tools": [TOOL]}, "b", "a", 1),
        (f"<think>{HERMES}</think>a", {"tools": [TOOL]}, HERMES, "a", 0),
        ("a <tool_call>{<think>b</think>c", {"tools": [TOOL]}, "b", "a <tool_call>{c", 0),
    ],
)
def test_reasoning_is_apart_from_the_answer(tokenizer, says, body, reasoning, content, calls):
    message = answers(tokenizer, says, **body)
    found = message["reasoning_content"], message["content"], len(message["tool_calls"])
    assert found == (reasoning, content, calls)


def test_reasoning_of_a_prompt_that_opens_it(tmp_path):
    source = TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n")
    message = answers(tool_tokenizer(tmp_path, source), "a\n</think>\n\n4")
    assert (message["reasoning_content"], message["content"]) == ("a", "4")


SPECIAL = [(pair, {}) for pair in REASONING if CHANNEL not in pair[0]]
MISTRAL = ("[THINK]", "[/THINK]")
SPECIAL += [(MISTRAL, {"tools": [TOOL]}), (MISTRAL, {"skip_special_tokens": False})]


@pytest.mark.parametrize(("pair", "body"), SPECIAL)
def test_marks_of_reasoning_that_are_special_tokens(pair, body, tmp_path):
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["hermes"].source)
    path = tmp_path / "tokenizer.json"
    pipeline = tokenizers.Tokenizer.from_file(str(path))
    pipeline.add_special_tokens(list(pair))
    pipeline.save(str(path))
    tokenizer = checkpoint_tokenizer(tmp_path, VOCAB_SIZE)
    assert {*pair} <= tokenizer.special_tokens.keys()
    message = answers(tokenizer, f"{pair[0]}2+2 is 4.{pair[1]}It is 4.<|im_end|>", **body)
    assert (message["reasoning_content"], message["content"]) == ("2+2 is 4.", "It is 4.")


def test_a_harmony_call_comes_with_its_reasoning(tmp_path):
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["harmony"].source)
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
    says = f"<|channel|>analysis<|message|>Look.{NEXT}{call}"
    message = answers(tokenizer, says, tools=[TOOL])
    assert (message["reasoning_content"], message["content"]) == ("Look.", "")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}


def test_special_tokens_are_written_if_they_are_not_skipped(tokenizer):
    message = answers(tokenizer, "a<|im_start|>b", skip_special_tokens=False)
    assert message["content"] == "a<|im_start|>b"
    assert answers(tokenizer, "a<|im_start|>b")["content"] == "ab"


def turn_of(tokenizer, format, ids, sizes, stops, tools):
    """Content, reasoning and calls of a choice that is dealt out so."""
    reader = CallReader(format, parameters_by_tool([TOOL])) if tools else None
    turn, output = TurnStream(calls=reader), Output(stops=stops)
    decode = tokenizer.decode_special
    transcript = Transcript(decode, tokenizer.stop_ids, output, False)
    content, reasoning, calls, begin, number = "", "", [], 0, 0
    while begin < len(ids):
        part = ids[begin : begin + sizes[number % len(sizes)]]
        begin, number = begin + len(part), number + 1
        last = begin >= len(ids)
        text, _ = transcript.add(part, [0.0] * len(part), None, last)
        delta = turn.add(text, last or transcript.stopped)
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        calls += [(call.name, call.arguments) for call in delta.calls]
        if transcript.stopped:
            break
    return content, reasoning, calls


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("seed", range(4))
def test_streams_are_the_whole_answer_however_it_comes(tokenizer, format, seed):
    """Of all families, with stops, cut anywhere."""
    draw = random.Random(seed)
    opened, closed = draw.choice(list(PAIRS.items()))
    pieces = [f"{opened}why {{ and [\n{closed}\n\n", "An answer: `", "\n", HARMONY[:-10], "[x]\n"]
    pieces += [
        format.render([CALL]),
        (*format.opening_markers, "<")[0],
        "na\u00efve \u20ac",
        opened,
    ]
    for stops in ((), ("answer",), (closed, "}")):
        for tools in (True, False):
            text = "".join(draw.sample(pieces, draw.randrange(1, 6)))
            ids = tokenizer.encode_special(text)[: draw.randrange(2, 200)]
            whole = turn_of(tokenizer, format, ids, [10**6], stops, tools)
            for size in (1, 2, 5):
                sizes = [size, draw.randrange(1, 9), size]
                assert turn_of(tokenizer, format, ids, sizes, stops, tools) == whole, text
