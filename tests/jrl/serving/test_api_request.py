"""Bodies of requests: what is served is read, all else is refused by its name."""

import json

import pytest

from jrl.rollout.adjustments import Adjustments
from jrl.serving.api.fields import ApiError
from jrl.serving.api.output import Output
from jrl.serving.api.sampling import read_generation_config, with_defaults
from jrl.serving.api_request import parse_chat, parse_completion

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}


def call(name, arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chosen(name):
    return {"type": "function", "function": {"name": name}}


def test_messages_have_calls_and_their_answers():
    messages = [
        {"role": "user", "content": "What is 1 + 2?", "name": "Ann"},
        {"role": "assistant", "tool_calls": [call("add", '{"a": 1, "b": 2}')], "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "content": "3", "reasoning_content": "easy"},
    ]
    asked = parse_chat({**CHAT, "messages": messages})
    first, calls, answer, last = asked.messages
    assert first == messages[0] and answer == messages[2] and last == messages[3]
    assert calls["content"] is None
    arguments = calls["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a": 1, "b": 2} and str(arguments) == '{"a": 1, "b": 2}'
    assert calls["tool_calls"][0]["id"] == "c"


ASSISTANT = {"role": "assistant", "content": "3"}
DETAILS = [
    {"type": "reasoning.text", "text": "easy"},
    {"type": "reasoning.encrypted", "data": "x"},
]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({**ASSISTANT, "refusal": "", "audio": None, "function_call": None}, ASSISTANT),
        ({**ASSISTANT, "id": "msg_1", "annotations": [{"type": "url_citation"}]}, ASSISTANT),
        ({**ASSISTANT, "provider_specific_fields": {"refusal": None}}, ASSISTANT),
        ({**ASSISTANT, "content": None, "refusal": "3"}, ASSISTANT),
        (
            {**ASSISTANT, "reasoning_details": DETAILS},
            {**ASSISTANT, "reasoning_content": "easy"},
        ),
        (
            {**ASSISTANT, "reasoning": "easy", "reasoning_details": DETAILS},
            {**ASSISTANT, "reasoning": "easy"},
        ),
        ({**ASSISTANT, "content": [{"type": "output_text", "text": "3"}]}, ASSISTANT),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "3", "detail": None}]},
            {"role": "user", "content": "3"},
        ),
    ],
)
def test_messages_that_other_servers_answered_are_read(message, expected):
    assert parse_chat({**CHAT, "messages": [message]}).messages == (expected,)


@pytest.mark.parametrize("written", ['{"a": 1, "b', "[3]", "add 1 and 2", "null"])
def test_calls_whose_arguments_are_no_object_keep_their_text(written):
    messages = [{"role": "assistant", "tool_calls": [call("add", written)]}]
    turn = parse_chat({**CHAT, "messages": messages}).messages[0]
    arguments = turn["tool_calls"][0]["function"]["arguments"]
    assert str(arguments) == written and arguments == {"arguments": written}


def test_numbers_are_read_as_clients_write_them():
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        given = {"top_k": 20.0, "logit_bias": {"5": "1", "7": 2}, "max_tokens": 3.0, "seed": 4.0}
        asked = parse({**body, **given})
        assert asked.adjustments == Adjustments(top_k=20, biases=((5, 1.0), (7, 2.0)))
        assert (asked.max_tokens, asked.seed) == (3, 4)


def test_output_arguments_of_vllm_are_read():
    given = {
        "stop": "x",
        "stop_token_ids": [3, 4],
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "prompt_logprobs": 1,
    }
    expected = Output(("x",), (3, 4), True, 2, True, False, True, True, 1)
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        assert parse({**body, **given}).output == expected
        assert parse({**body, "skip_special_tokens": True}).output == Output()
        assert parse(body).output == Output()


ANSWERED = [*CHAT["messages"], ASSISTANT]


def test_the_prompt_of_a_chat_may_end_otherwise():
    for given, ending in (
        ({}, "opened"),
        ({"add_generation_prompt": True}, "opened"),
        ({"add_generation_prompt": False}, "closed"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "continued"),
        ({"continue_final_message": True}, "continued"),
    ):
        assert parse_chat({**CHAT, "messages": ANSWERED, **given}).ending == ending


def test_reasoning_effort_is_a_variable_of_the_template():
    asked = parse_chat({**CHAT, "reasoning_effort": "low"})
    assert asked.template_arguments == {"reasoning_effort": "low"}
    same = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert parse_chat({**CHAT, **same}).template_arguments == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ("yes", "no")),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"guided_json": '{"type": "object"}'}, "json", {"type": "object"}),
        ({"structured_outputs": {"regex": "a", "json": None}}, "regex", "a"),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
    ],
)
def test_rules_of_the_text_are_read(given, kind, value):
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        rule = parse({**body, **given}).rule
        assert rule is not None and (rule.kind, rule.value) == (kind, value)
        assert rule.param.split(".")[0] in given


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None)),
        ("auto", ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        (chosen("b"), ("required", "b")),
    ],
)
def test_tools_and_the_choice_among_them(choice, expected):
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    given = {"tools": [tool("a"), tool("b", parameters)], "tool_choice": choice}
    tools = parse_chat({**CHAT, **given}).tools
    assert (tools.choice, tools.name) == expected and tools.parallel
    assert tools.parameters == {"a": {}, "b": parameters}
    assert not parse_chat({**CHAT, **given, "parallel_tool_calls": False}).tools.parallel
    for none in ({"tools": []}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
        assert parse_chat({**CHAT, **none}).tools is None


def test_what_is_left_out_is_as_openai_has_it():
    asked = parse_completion(COMPLETION)
    assert (asked.prompts, asked.max_tokens, asked.n) == (("hello",), None, 1)
    assert (asked.temperature, asked.top_p, asked.seed, asked.output.stops) == (1.0, 1.0, None, ())
    assert not (asked.stream or asked.logprobs or asked.echo or asked.chat)
    asked = parse_chat(CHAT)
    assert asked.chat and asked.max_tokens is None
    assert asked.messages == ({"role": "user", "content": "hello"},)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], ("a", "b")),
        ([3, 4], ((3, 4),)),
        ([[3, 4], [5]], ((3, 4), (5,))),
    ],
)
def test_prompts_are_texts_or_ids(prompt, expected):
    assert parse_completion({**COMPLETION, "prompt": prompt}).prompts == expected


def test_arguments_of_the_template():
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    assert parse_chat({**CHAT, **given}).template_arguments == {"enable_thinking": False}
    assert parse_chat({**CHAT, "chat_template_kwargs": None}).template_arguments == {}
    for wrong in (3, [], {"messages": []}):
        with pytest.raises(ApiError) as refused:
            parse_chat({**CHAT, "chat_template_kwargs": wrong})
        assert refused.value.body["error"]["param"] == "chat_template_kwargs"


def test_everything_that_is_served_is_read():
    asked = parse_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be "}] * 2},
                {"role": "user", "content": "hello", "name": None},
            ],
            "max_completion_tokens": 7,
            "max_tokens": 7,
            "n": 2,
            "temperature": 0,
            "top_p": 0.5,
            "seed": -3,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 4,
            "user": "me",
            # What changes nothing is let through.
            "frequency_penalty": 0,
            "logit_bias": {},
            "tools": None,
            "response_format": {"type": "text"},
        }
    )
    assert asked.messages[0] == {"role": "system", "content": "be be "}
    assert (asked.max_tokens, asked.n, asked.seed, asked.output.stops) == (7, 2, -3, ("a", "b"))
    assert (asked.temperature, asked.top_p) == (0.0, 0.5)
    assert asked.stream and asked.include_usage and asked.logprobs and asked.top_logprobs == 4
    assert asked.adjustments is None


LABELS = {
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "metadata": {"trace": "1"},
}
NEUTRAL = {"priority": 0, "return_token_ids": False, "return_tokens_as_token_ids": False}


def test_what_clients_add_and_changes_no_answer_is_passed_over():
    options = {"include_obfuscation": False, "other": None}
    stream = {"stream": True, "stream_options": {"include_usage": True, **options}}
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        assert parse({**body, **LABELS, **NEUTRAL}) == parse(body)
        asked = parse({**body, **stream})
        assert asked.stream and asked.include_usage
    chat = {"top_logprobs": 0, "logprobs": False, "echo": False, "documents": []}
    assert parse_chat({**CHAT, **chat, "include_reasoning": True}) == parse_chat(CHAT)


def test_adjustments_are_read_and_neutral_ones_are_none():
    given = {
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.05,
        "logit_bias": {"3": 5, "7": -100, "9": 0},
    }
    biases = ((3, 5.0), (7, -100.0))
    expected = Adjustments(20, 0.1, -1.0, 0.5, 1.05, biases)
    neutral = {
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {"9": 0},
        "length_penalty": 1.0,
        "best_of": 1,
    }
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        assert parse({**body, **given}).adjustments == expected
        assert parse({**body, **neutral}).adjustments is None
        assert parse({**body, "top_k": 0}).adjustments is None


def test_defaults_of_a_checkpoint_are_those_of_requests_that_do_not_say(tmp_path):
    path = tmp_path / "generation_config.json"
    assert read_generation_config(tmp_path) == ({}, None)
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 9,
        "top_p": None,
    }
    path.write_text(json.dumps({**content, "eos_token_id": [2], "bos_token_id": 1}))
    defaults, longest = read_generation_config(tmp_path)
    assert (defaults, longest) == ({"temperature": 0.6, "top_k": 20}, 9)
    asked = parse_chat(with_defaults({**CHAT, "top_p": 0.5, "temperature": None}, defaults))
    assert (asked.temperature, asked.top_p) == (0.6, 0.5)
    assert asked.adjustments == Adjustments(top_k=20)
    asked = parse_chat(with_defaults({**CHAT, "temperature": 0, "top_k": -1}, defaults))
    assert asked.temperature == 0 and asked.adjustments is None
    for wrong in ("[]", "{", '{"top_p": 2}', '{"max_new_tokens": 0}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="or serve with --generation-config none"):
            read_generation_config(tmp_path)


BOTH = [
    ({"model": None}, "model", "must be the name of a model"),
    ({"n": 0}, "n", r"n=0 must be a whole number in 1\.\.128"),
    ({"n": True}, "n", "n=True must be a whole number"),
    ({"temperature": 2.5}, "temperature", r"temperature=2.5 must be a number in 0\.\.2"),
    ({"temperature": float("nan")}, "temperature", "temperature=nan must be a number"),
    ({"top_p": 0}, "top_p", "top_p=0 leaves no token"),
    ({"top_p": 1e-50}, "top_p", "top_p=1e-50 leaves no token in float32: use temperature=0"),
    ({"temperature": 1e-37}, "temperature", "temperature=1e-37 is less than 1e-30, and logits"),
    ({"seed": 2**63}, "seed", "must be a whole number"),
    ({"stop": ""}, "stop", "must be a text that is not empty"),
    ({"stop": ["a"] * 5}, "stop", "or a list of 4 at most"),
    ({"stream": 1}, "stream", "stream=1 must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "must be"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options",
        "needs include_usage=true",
    ),
    ({"max_tokens": 10**4299}, "max_tokens", "must be a whole number from [01] to 2147483647"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", r"must be a number in -2\.\.2"),
    ({"presence_penalty": "1"}, "presence_penalty", "presence_penalty='1' must be a number"),
    ({"repetition_penalty": 0}, "repetition_penalty", r"must be a number in 0\.01\.\.100"),
    ({"min_p": 1.5}, "min_p", r"must be a number in 0\.\.1"),
    ({"top_k": -2}, "top_k", "top_k=-2 must be a whole number from -1"),
    ({"top_k": 2.5}, "top_k", "must be a whole number"),
    ({"logit_bias": [3]}, "logit_bias", "must be an object of token ids"),
    ({"logit_bias": {"a": 5}}, "logit_bias", r"logit_bias=\{'a': 5\} must be an object of token"),
    ({"logit_bias": {"3": 500}}, "logit_bias", "numbers in -100..100"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "has 301 tokens: give 300"),
    ({"length_penalty": 1.2}, "length_penalty", "length_penalty=1.2 is not supported"),
    ({"use_beam_search": True}, "use_beam_search", "is not supported"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must be a list of at most 128 token ids"),
    ({"stop_token_ids": 3}, "stop_token_ids", "must be a list"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens=9 is more than max_tokens=3"),
    ({"ignore_eos": 1}, "ignore_eos", "must be true or false"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be a whole number in"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not supported with stream"),
    ({"guided_regex": ""}, "guided_regex", "must be a text that is not empty"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "must be a list of texts"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be a text"),
    ({"structured_outputs": {"tag": "x"}}, "structured_outputs.tag", "is not supported"),
    ({"structured_outputs": "x"}, "structured_outputs", "must be an object with one of"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "is not supported"),
]
OF_COMPLETIONS = [
    ({"prompt": None}, "prompt", "prompt=None must be a text"),
    ({"prompt": []}, "prompt", "must be a text"),
    ({"prompt": ["a", 3]}, "prompt", "must be a text"),
    ({"prompt": ["a"] * 129}, "prompt", "prompt has 129 prompts"),
    ({"prompt": ["a"] * 43, "n": 3}, "n", "n=3 of 43 prompts are 129 choices: request at most 128"),
    ({"logprobs": 21}, "logprobs", r"logprobs=21 must be a whole number in 0\.\.20"),
    ({"max_tokens": -1}, "max_tokens", "must be a whole number from 0"),
    ({"best_of": 3}, "best_of", "best_of=3 is not supported"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    ({"messages": []}, "messages", "is not supported"),
]
OF_CHATS = [
    ({"max_tokens": 0}, "max_tokens", "must be a whole number from 1"),
    ({"messages": []}, "messages", r"messages=\[\] must be a list"),
    ({"messages": ["hello"]}, "messages[0]", "must be"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
    (
        {"messages": [{"role": "user", "content": "x", "name": 3}]},
        "messages[0].name",
        "must be a text",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]},
        "messages[0].audio",
        "is not supported",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0]",
        "must be",
    ),
    ({"messages": [{"role": "tool"}]}, "messages[0].content", "must be a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "is of type 'image_url'",
    ),
    (
        {"messages": [{**ASSISTANT, "refusal": "no"}]},
        "messages[0].refusal",
        "is not supported",
    ),
    (
        {"messages": [{**ASSISTANT, "reasoning_details": "x"}]},
        "messages[0].reasoning_details",
        "must be",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort",
        "differ: give one",
    ),
    ({"continue_final_message": True}, "continue_final_message", "needs a last message of the"),
    (
        {"messages": ANSWERED, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "needs add_generation_prompt=false",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2 needs logprobs=true"),
    ({"logprobs": 3}, "logprobs", "logprobs=3 must be true or false"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ: give one"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "must be"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": "x"}, "tools", "must be a list"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [tool("a"), tool("a")]}, "tools[1]", "two of the name 'a'"),
    ({"tools": [tool("a", [])]}, "tools[0].function.parameters", "must be a JSON schema"),
    ({"tools": [tool("a")], "tool_choice": "any"}, "tool_choice", '"required", or'),
    ({"tools": [tool("a")], "tool_choice": chosen("b")}, "tool_choice", "with one of a"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    ({"response_format": "json"}, "response_format", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
    ({"response_format": {"json_schema": {"schema": {}}}}, "response_format", "must be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "must be a JSON schema",
    ),
    ({"prompt": "x"}, "prompt", "is not supported"),
]


@pytest.mark.parametrize(
    ("parse", "body", "param", "message"),
    [
        *(
            (parse_completion, {**COMPLETION, **more}, *said)
            for more, *said in BOTH + OF_COMPLETIONS
        ),
        *((parse_chat, {**CHAT, **more}, *said) for more, *said in BOTH + OF_CHATS),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(parse, body, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        parse(body)
    error = refused.value.body["error"]
    assert refused.value.status == 400
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
