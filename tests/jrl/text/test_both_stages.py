"""Supervised fine-tuning and RL encode a record's conversation alike."""

import json
from dataclasses import replace

import pytest
from chat_checkpoint import TURN, chat_tokenizer
from chat_kinds import TEMPLATES, write
from chat_records import ANSWERS, RECORDS, TEMPLATE

from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.records import example_of
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.loss_mask import ChatFormat, encode_chat
from jrl.text.prompt_format import PromptFormat

THINKS = {"enable_thinking": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("qwen"), chat_template=TEMPLATE)


@pytest.mark.parametrize("name", RECORDS)
def test_one_record(tokenizer, name):
    record, prompt, learned = RECORDS[name]
    fields = Fields(answer=ANSWERS.get(name, "answer"))
    template = ChatTemplate(tokenizer)
    reinforced = PromptFormat(tokenizer, template).encode(example_of(record, "f:1", fields))
    assert tokenizer.decode_special(reinforced) == prompt
    # sft learns each turn of the assistant; the prompt stands before the last of them.
    chat = chat_of(record, "f:1", fields, last=True)
    found = encode_chat(ChatFormat(tokenizer, template, last=True), chat, last=True)
    assert found.ids[: found.context].tolist() == reinforced
    assert tokenizer.decode_special(found.ids[found.loss_mask].tolist()) == learned
    assert found.ids[-1] == tokenizer.special_tokens[TURN]
    whole = encode_chat(ChatFormat(tokenizer, template), chat_of(record, "f:1", fields))
    assert whole.ids.tolist() == found.ids.tolist()


WRITES_OTHERWISE = {
    ("mistral", name)
    for name in ("TRL's", "messages and an answer", "ShareGPT's", "ShareGPT's with a system field")
}
"""Templates that write a prompt otherwise if an answer follows: Mistral's has the system message
before a user's turn that is the last, and nowhere else."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_records_in_templates_of_many_families(name, tmp_path):
    """The prompt is the context of the learned turn in sft, or both stages refuse the record."""
    tokenizer = checkpoint_tokenizer(write(tmp_path, "bytes", name), 600)
    template = ChatTemplate(tokenizer)
    both = PromptFormat(tokenizer, template), ChatFormat(tokenizer, template, last=True)
    same = 0
    for of, (record, _, _) in RECORDS.items():
        fields = Fields(answer=ANSWERS.get(of, "answer"))
        example, chat = example_of(record, "f:1", fields), chat_of(record, "f:1", fields, last=True)
        try:
            reinforced = both[0].encode(example)
        except ValueError:
            reinforced = None
        try:
            found = encode_chat(both[1], chat, last=True)
            learned = found.ids[: found.context].tolist()
        except ValueError as error:
            learned = None
            if (name, of) in WRITES_OTHERWISE:
                assert "differently than at the start of the full" in str(error)
                continue
            if of == "reasoning":  # of a turn that only sft reads; none of them writes it
                assert "does not write reasoning_content" in str(error)
                continue
        assert learned == reinforced, of
        same += learned is not None
    assert same >= 10


def test_arguments_of_the_run_come_after_those_of_a_record(tokenizer):
    record, prompt, _ = RECORDS["template arguments"]
    plain = {name: value for name, value in record.items() if name != "chat_template_kwargs"}
    for arguments, given, thinks in (
        ({}, plain, True),
        ({"enable_thinking": False}, plain, False),
        ({"enable_thinking": True}, record, False),
        (
            {"enable_thinking": False},
            {**plain, "chat_template_kwargs": {"enable_thinking": True}},
            True,
        ),
    ):
        format = PromptFormat(tokenizer, ChatTemplate(tokenizer), None, arguments)
        ids = format.encode(example_of(given, "f:1"))
        assert tokenizer.decode_special(ids) == (
            prompt.removesuffix("<think></think>") if thinks else prompt
        )


def test_a_null_reaches_templates_that_look_for_it(tokenizer):
    record = RECORDS["a call without content"][0]
    tools = "{% for t in tools %}{{ t.function.name }};{% endfor %}"
    calls = "{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    written_calls = json.dumps(record["messages"][1]["tool_calls"])
    for source, written in (
        ("{% for m in messages %}{{ m.content }}", f"2+2?;{written_calls};4;"),
        (
            "{% for m in messages %}{{ 'null' if m['content'] is none else m.content }}",
            f"2+2?;null{written_calls};4;",
        ),
    ):
        made = tokenizer.with_usage(replace(tokenizer.usage, chat_template=tools + source + calls))
        format = PromptFormat(made, ChatTemplate(made))
        ids = format.encode(example_of(record, "f:1"))
        assert made.decode_special(ids) == "add;" + written


def test_arguments_of_a_call_for_templates_that_add_texts(tokenizer):
    """Templates that concatenate arguments as text (DeepSeek's), and templates that write JSON."""
    for name in ("a call", "a call as JSON"):
        conversation = PromptFormat(tokenizer).conversation(example_of(RECORDS[name][0], "f:1"))
        source = (
            "{% for m in messages %}{% for c in m.tool_calls %}"
            "{% set given = c.function.arguments %}{{ 'json ' + given + ' ' + c.function.name }} "
            "{{ given.a }} {{ given | tojson }}"
            "{% endfor %}{% endfor %}"
        )
        made = tokenizer.with_usage(replace(tokenizer.usage, chat_template=source))
        arguments = '{"a": 2, "b": null}'
        assert ChatTemplate(made).write(conversation) == f"json {arguments} add 2 {arguments}"


def test_without_a_template(tokenizer):
    """A single question is a text; tools and conversations are refused in one line."""
    format = PromptFormat(tokenizer)
    for name in ("texts", "prompt as messages", "messages"):
        example = example_of(RECORDS[name][0], "f:1")
        chat = chat_of(RECORDS[name][0], "f:1")
        ids = format.encode(example)
        assert ids == tokenizer.encode("2+2?")
        found = encode_chat(format, chat)
        assert found.ids[: found.context].tolist() == ids
    for name, message in (
        ("a call", "is a conversation, and the model has no chat template"),
        ("messages and an answer", "is a conversation"),
    ):
        with pytest.raises(ValueError, match=message):
            format.encode(example_of(RECORDS[name][0], "f:1"))
    record = {**RECORDS["messages"][0], "tools": RECORDS["a call"][0]["tools"]}
    with pytest.raises(ValueError, match="has tools, and the model no chat template"):
        format.encode(example_of(record, "f:1"))
    with pytest.raises(ValueError, match="f:1: it has tools, and the model no chat template"):
        encode_chat(format, chat_of(record, "f:1"))


def test_a_text_is_learned_as_it_is(tokenizer):
    format, text = PromptFormat(tokenizer, ChatTemplate(tokenizer)), f"a<|im_start|>user\nb{TURN}"
    found = encode_chat(format, chat_of({"text": text}, "f:1"))
    assert found.ids.tolist() == tokenizer.encode(text)
    assert found.loss_mask.tolist() == [False, *[True] * (len(found.ids) - 1)]
    open_ = encode_chat(PromptFormat(tokenizer), chat_of({"text": "ab"}, "f:1"))
    assert open_.ids.tolist() == [*tokenizer.encode("ab"), tokenizer.eos_id]
    message = 'f:1: has no field "prompt".*perhaps --prompt-field text'
    with pytest.raises(ValueError, match=message):
        example_of({"text": "ab"}, "f:1")
