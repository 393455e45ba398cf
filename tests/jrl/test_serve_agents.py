"""A server of its own as agents use it: by the official client, with two tools and with schemas."""

import json
from dataclasses import replace

import openai
import pytest
from served import NETWORK, serving, write_checkpoint
from tool_templates import TEMPLATES

pydantic = pytest.importorskip("pydantic", reason="the client's, needs .[test]")
pytest.importorskip("llguidance", reason="needs .[grammar]")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "Gives the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Lima", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Converts a temperature.",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    },
]
FUNCTIONS = {
    "forecast": lambda city, days: f"{20 + days} C in {city}",
    "convert": lambda unit: f"75 {unit}",
}
NAMED = {"type": "function", "function": {"name": "convert"}}
ASKED = {"role": "user", "content": "How warm is it?"}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    # Tools are long in a tokenizer of so few merges.
    network = replace(NETWORK, max_positions=2048)
    model = write_checkpoint(
        folder / "model", network=network, chat_template=TEMPLATES["hermes"].source
    )
    flags = ["--slots=2", "--no-warm-up", "--window=4"]
    with (
        serving(str(model), folder / "log", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made,
    ):
        yield made


def streamed(client, **asked):
    """Content, calls and finish reason of a stream, put together as clients do."""
    content, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(stream=True, **asked):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            calls[call.index] = (call.id, call.function.name, call.function.arguments)
        finish = choice.finish_reason or finish
    return content, [calls[index] for index in sorted(calls)], finish


@pytest.mark.slow
def test_an_agent_loop_with_two_tools(client):
    """Calls, answers of the tools, and an answer; whatever a policy of random weights writes."""
    messages, called, lengths = [ASKED], [], []
    for choice in ("required", NAMED, "none"):
        asked = {"model": "model", "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
        asked |= {"messages": list(messages), "temperature": 0 if choice != "required" else 1}
        answer = client.chat.completions.create(**asked, seed=3)
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        content, calls, end = streamed(client, **asked, seed=3)
        lengths.append(answer.usage.prompt_tokens)
        found = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        assert (content, calls, end) == (message.content or "", found, finish)
        if choice == "none":
            assert not calls and finish in ("stop", "length")
            break
        assert finish == "tool_calls" and message.content is None
        (call,) = message.tool_calls
        arguments = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**arguments)  # a wrong one would raise
        called.append((call.id, call.function.name))
        # As the client has them, with all its fields.
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert [identity for identity, _ in called] == ["call00000", "call00001"]
    assert called[1][1] == "convert"
    assert lengths == sorted(lengths) and lengths[0] > 100, "the tools are in the prompt"


@pytest.mark.slow
def test_answers_are_parsed_by_the_client(client):
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=150)
        married: bool

    parse = client.chat.completions.parse
    for seed in range(3):
        answer = parse(
            model="model", messages=[ASKED], response_format=Person, max_tokens=200, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
    text = {"model": "model", "messages": [ASKED], "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**text).choices[0].message.content
    both = client.chat.completions.create(**text, frequency_penalty=0.0, logit_bias={})
    assert both.choices[0].message.content == plain
    biased = client.chat.completions.create(**text, logit_bias={"70": 100}, presence_penalty=-2)
    content = biased.choices[0].message.content
    assert len(set(content)) == 1 and content != plain, "one token, again and again"


@pytest.mark.slow
def test_a_prompt_is_scored_token_by_token(client):
    """Its log-probabilities equal the log-probabilities of the same tokens generated greedily."""
    asked = {"model": "model", "prompt": "How warm", "temperature": 0, "logprobs": 2}
    generated = client.completions.create(**asked, max_tokens=12).choices[0]
    whole = client.completions.create(
        **{**asked, "prompt": asked["prompt"] + generated.text}, echo=True, max_tokens=0
    )
    scored, count = whole.choices[0].logprobs, len(generated.logprobs.tokens)
    if scored.tokens[-count:] == generated.logprobs.tokens:  # the text may have other tokens
        expected = pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)
        assert scored.token_logprobs[-count:] == expected
    ids = client.completions.create(
        **{**asked, "prompt": [70, 71, 72, 73]}, echo=True, max_tokens=1
    )
    logprobs = ids.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == 5
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(
        max(top.values()) >= value
        for top, value in zip(logprobs.top_logprobs[1:], logprobs.token_logprobs[1:], strict=True)
    )
