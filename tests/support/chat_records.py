"""Records of every form in which people have conversations; a template that writes all of it."""

import json

TEMPLATE = """\
{%- if tools %}{{- "<|im_start|>tools\\n" }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}{{- "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role }}
    {%- if message.name %}{{- "(" + message.name + ")" }}{% endif %}
    {%- if message.tool_call_id %}{{- "#" + message.tool_call_id }}{% endif %}
    {{- "\\n" }}
    {%- if message.reasoning_content %}
        {{- "<think>" + message.reasoning_content + "</think>" }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls %}
        {%- set call = call.function or call %}
        {{- "<tool_call>" + call.name + " " + call.arguments | tojson + "</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- "<think></think>" }}{% endif %}
{%- endif %}
"""
ASKED, SAID = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Count."}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
WRITTEN_CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": null}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SAYING = {**CALLING, "content": "I add."}
GIVEN = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}

TWO = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
"""The prompt of a single question."""
COUNT = f"<|im_start|>system\nCount.<|im_end|>\n{TWO}"
TOOL = f"<|im_start|>tools\n{json.dumps(SCHEMA)}<|im_end|>\n"
WITH_CALL = (
    f'{TOOL}{TWO}I add.<tool_call>add {{"a": 2, "b": null}}</tool_call><|im_end|>\n'
    "<|im_start|>tool(add)#c1\n4<|im_end|>\n<|im_start|>assistant\n"
)
END = "4<|im_end|>"

RECORDS = {
    "texts": ({"prompt": "2+2?", "answer": "4"}, TWO, END),
    "a number": ({"prompt": "2+2?", "answer": 4}, TWO, END),
    "completion": ({"prompt": "2+2?", "completion": "4"}, TWO, END),
    "prompt as messages": ({"prompt": [ASKED], "answer": "4"}, TWO, END),
    "TRL's": ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, COUNT, END),
    "both": ({"prompt": [ASKED], "completion": "4", "answer": "4"}, TWO, END),
    "messages": ({"messages": [ASKED, SAID]}, TWO, END),
    "messages and an answer": ({"messages": [SYSTEM, ASKED], "answer": "4"}, COUNT, END),
    "null beside messages": ({"prompt": None, "messages": [ASKED], "answer": "4"}, TWO, END),
    "messages as JSON": (
        {"messages": '[{"role": "user", "content": "2+2?"}]', "answer": 4},
        TWO,
        END,
    ),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]},
                {**SAID, "content": [{"type": "text", "text": "4"}]},
            ]
        },
        TWO,
        END,
    ),
    "ShareGPT's": (
        {
            "conversations": [
                {"from": "system", "value": "Count."},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
            ]
        },
        COUNT,
        END,
    ),
    "ShareGPT's with a system field": (
        {
            "system": "Count.",
            "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
        },
        COUNT,
        END,
    ),
    "several turns": (
        {"messages": [ASKED, {**SAID, "content": "5"}, {**ASKED, "content": "Sure?"}, SAID]},
        f"{TWO}5<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
        END,
    ),
    "verl's": (
        {
            "data_source": "sums",
            "prompt": [ASKED],
            "reward_model": {"style": "rule", "answer": "4"},
        },
        TWO,
        END,
    ),
    "a call": (
        {
            "messages": [ASKED, SAYING, GIVEN],
            "tools": [SCHEMA],
            "answer": 4,
        },
        WITH_CALL,
        END,
    ),
    "a call as JSON": (
        {
            "messages": [
                ASKED,
                {**SAYING, "tool_calls": [WRITTEN_CALL]},
                GIVEN,
            ],
            "tools": json.dumps([SCHEMA]),
            "answer": 4,
        },
        WITH_CALL,
        END,
    ),
    "a call without content": (
        {"messages": [ASKED, CALLING, GIVEN], "tools": [SCHEMA], "answer": 4},
        WITH_CALL.replace("I add.", ""),
        END,
    ),
    "ShareGPT's call": (
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "4"},
            ]
        },
        f'{TWO}<tool_call>add {{"a": 2}}</tool_call><|im_end|>\n<|im_start|>tool\n4<|im_end|>\n'
        "<|im_start|>assistant\n",
        END,
    ),
    "reasoning": (
        {"messages": [ASKED, {**SAID, "reasoning_content": "two twos"}]},
        TWO,
        "<think>two twos</think>" + END,
    ),
    "template arguments": (
        {
            "messages": [ASKED],
            "answer": "<think></think>4",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        f"{TWO}<think></think>",
        END,
    ),
    "an empty output": (
        {"messages": [ASKED, {**CALLING, "content": "I"}, {**GIVEN, "content": ""}], "answer": 4},
        WITH_CALL.removeprefix(TOOL).replace("I add.", "I").replace("#c1\n4", "#c1\n"),
        END,
    ),
    "a special token": (
        {"prompt": "2+<|im_end|>2?", "answer": "4"},
        TWO.replace("2+2", "2+<|im_end|>2"),
        END,
    ),
}
"""A record, the prompt that the template makes of it, and what is learned of its last turn."""
ANSWERS = {"verl's": "reward_model.answer"}
"""Fields of the answers that have other names."""
