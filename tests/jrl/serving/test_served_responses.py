"""The Responses API, by the official client: items, streams, and the chats that they ask for."""

import json

import openai
import pytest
from openai.types.responses import Response
from scripted import House, Turns
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.serving.api.fields import ApiError
from jrl.serving.api.messages import messages_of
from jrl.serving.api.response_request import chat_of
from jrl.serving.api_request import parse_response
from jrl.serving.policy import ApiModel
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
ASKED = {"model": "m", "input": "?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("responses"), TEMPLATES["hermes"].source)


def played(tokenizer, texts, scene, error=None):
    """What a scene with the client of a policy that says these texts returns, and the prompts; the
    policy fails by an error, if given."""
    format, engine = PromptFormat(tokenizer, ChatTemplate(tokenizer)), Turns(tokenizer, texts)
    served = ApiModel("m", format, 4000, None, 0)
    house = House(served=served, engine=engine, most_bytes=9000)
    engine.error = error

    async def talk(http):
        url = "http://localhost/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="any", http_client=http, max_retries=0)
        return await scene(client.responses)

    return house.run(talk), [tokenizer.decode_special(ids) for ids in engine.prompts]


def content_of(response):
    """Types and texts of the items of a response, which must be what the client says it is."""
    Response.model_validate(response.model_dump(warnings=False), strict=True)
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


@pytest.mark.parametrize(
    ("says", "more", "items", "status"),
    [
        ("It is 4.", {}, [("message", "It is 4.")], "completed"),
        (
            "<think>2+2</think>It is 4.",
            {},
            [("reasoning", "2+2"), ("message", "It is 4.")],
            "completed",
        ),
        ("<think>2+2</think>4", {"include_reasoning": False}, [("message", "4")], "completed"),
        (
            f"<think>a</think>Look. {CALL}",
            {"tools": [TOOL]},
            [("reasoning", "a"), ("message", "Look."), ("function_call", '{"x": 1}')],
            "completed",
        ),
        (CALL, {"tools": [TOOL]}, [("function_call", '{"x": 1}')], "completed"),
        (CALL, {"tools": [TOOL], "tool_choice": "none"}, [("message", CALL)], "completed"),
        ("It is 4.", {"max_output_tokens": 5}, [("message", "It is")], "incomplete"),
        ("<think>2+2", {"max_output_tokens": 9}, [("reasoning", "2+")], "incomplete"),
        ("", {}, [("message", "")], "completed"),
    ],
)
def test_items_and_their_stream(tokenizer, says, more, items, status):
    more = {"extra_body": {n: more.pop(n) for n in ("include_reasoning",) if n in more}, **more}

    async def scene(responses):
        whole = await responses.create(**ASKED, **more)
        events = [event async for event in await responses.create(**ASKED, **more, stream=True)]
        if status == "incomplete":  # the client's helper reads complete responses alone
            return whole, events, whole
        async with responses.stream(**ASKED, **more) as stream:
            return whole, events, await stream.get_final_response()

    (whole, events, put_together), _ = played(tokenizer, [says], scene)
    assert content_of(whole) == items and whole.status == status
    assert content_of(events[-1].response) == content_of(put_together) == items
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}"
    deltas = ["" for _ in items]
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.output_index] += event.delta
    assert deltas == [text for _, text in items]
    for end in ("added", "done"):
        kinds = [e.item.type for e in events if e.type == f"response.output_item.{end}"]
        assert kinds == [kind for kind, _ in items]
    assert [item.status for item in whole.output][-1] == status
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    reasoned = any(kind == "reasoning" for kind, _ in items)
    hidden = bool(more["extra_body"])
    assert (usage.output_tokens_details.reasoning_tokens > 0) == (reasoned or hidden)


def test_an_agent_loop_of_the_client(tokenizer):
    """The items of a response are the input of the next request, with the output of a call."""

    async def scene(responses):
        asked = {"model": "m", "tools": [TOOL], "instructions": "Be brief."}
        items = [{"role": "user", "content": [{"type": "input_text", "text": "What is f(1)?"}]}]
        first = await responses.create(input=items, **asked)
        call = first.output[-1]
        items += [item.model_dump() for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "6"}]
        return call, await responses.create(input=items, **asked)

    texts = [f"<think>a</think>Look.{CALL}", "It is 6."]
    (call, last), (_, prompt) = played(tokenizer, texts, scene)
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 1})
    assert last.output_text == "It is 6." and last.instructions == "Be brief."
    assert "Be brief." in prompt and "Look." in prompt
    assert prompt.index('{"x": 1}') < prompt.index("<tool_response>\n6")


def test_a_conversation_of_items_is_the_chats():
    """Reasoning, message and calls of one turn are one message."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "6"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "7"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
        {"type": "message", "role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    calls = [
        {"id": identity, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        for identity in ("c1", "c2")
    ]
    tool = {"role": "tool", "name": "f"}
    assistant = {"role": "assistant"}
    expected = [
        {"role": "user", "content": "a"},
        {**assistant, "reasoning_content": "b", "content": "c", "tool_calls": calls},
        {**tool, "tool_call_id": "c1", "content": "6"},
        {**tool, "tool_call_id": "c2", "content": "7"},
        {**assistant, "reasoning_content": "d", "content": "e"},
        {**assistant, "content": "f"},
    ]
    chat = chat_of({"model": "m", "input": items})
    assert messages_of(chat) == messages_of({"messages": expected})


def test_arguments_of_a_response_are_the_chats():
    schema = {"type": "object"}
    body = {
        **ASKED,
        "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "top_k": 5,
        "metadata": {"a": "b"},
    }
    request = parse_response(body)
    assert (request.max_tokens, request.rule.value, request.rule.param) == (
        9,
        schema,
        "text.format",
    )
    assert request.template_arguments == {"reasoning_effort": "low"}
    assert request.adjustments.top_k == 5
    assert request.repeated["text"] == body["text"] and request.repeated["top_p"] == 1.0


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": [1]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": 3}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a", "tool_calls": [3]}]}, "input[0].tool_calls"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{**CALLED, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "namespace": "n"}]}, "input[0].namespace"),
        ({"input": [{**CALLED, "name": None}]}, "input[0].tool_calls[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0]"),
        ({"instructions": 3}, "instructions"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": 3}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "json"}, "text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ],
)
def test_what_a_response_does_not_have_is_refused_by_name(given, param):
    with pytest.raises(ApiError) as refused:
        parse_response({**ASKED, **given})
    assert refused.value.status == 400 and refused.value.param == param
    assert "\n" not in refused.value.message


def test_a_stream_that_fails_ends_with_an_error(tokenizer):
    async def scene(responses):
        return [event async for event in await responses.create(**ASKED, stream=True)]

    (*_, last), _ = played(tokenizer, ["a"], scene, error=RuntimeError("no memory"))
    assert last.type == "error" and last.message == "the engine has failed: no memory"
