"""Tools in a conversation: format of a template, messages for an environment, tokens of an
answer."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tool_templates import SPECIAL, STOPS, TEMPLATES, tool_tokenizer

from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation
from jrl.tasks.tools.calls import Call
from jrl.tasks.tools.detection import FORMATS
from jrl.tasks.tools.tool import Tool
from jrl.text.chat import ChatTemplate
from jrl.text.conversation import (
    answer_ids,
    environment_messages,
    message_of,
    reference_conversation,
)
from jrl.text.prompt_format import PromptFormat
from jrl.text.tool_calls import attach_calls


def calc(expression: str) -> str:
    """Computes."""
    return expression


TOOL = Tool.of(calc)
TOOLS = (json.dumps(TOOL.schema),)
EXAMPLE = Example("2*3?", "6", tools=TOOLS)
KNOWN = {"calc": TOOL.parameters}
SAID = [Call("calc", {"expression": "2*3"})]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The format of prompts with a template."""
    tokenizer = tool_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATES["hermes"].source)

    def of(source):
        own = tokenizer.with_usage(replace(tokenizer.usage, chat_template=source))
        return PromptFormat(own, ChatTemplate(own))

    return of


def called(format, calls=SAID):
    """A turn with calls, as the policy writes it up to its stop token."""
    text = format.tool_format.render(calls)
    return next((text.removesuffix(stop) for stop in STOPS if text.endswith(stop)), text)


def test_every_format_has_a_template():
    assert set(TEMPLATES) == {format.name for format in FORMATS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_is_found(made, name):
    format = made(TEMPLATES[name].source)
    assert format.tool_format.name == name
    format.check_tools(EXAMPLE)
    assert "calc" in format.tokenizer.decode_special(format.encode(EXAMPLE))


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_written_as_the_template_writes_it(made, name):
    template = TEMPLATES[name]
    format = made(template.source)
    decode, turn = format.tokenizer.decode_special, ("assistant", called(format))
    ids = answer_ids(format, EXAMPLE, (turn,), (("tool", "6"),))
    assert decode(ids) == template.answered
    # The second call of a conversation, and one that could not be made.
    second = ("assistant", turn[1].replace("calc:0", "calc:1"))
    again = answer_ids(format, EXAMPLE, (turn, ("tool", "6"), second), (("tool", "6"),))
    assert decode(again) == template.answered.replace("00000", "00001").replace("calc:0", "calc:1")
    broken = ("assistant", turn[1].replace("calc", "sum"))
    unread = decode(answer_ids(format, EXAMPLE, (broken,), (("tool", "no"),)))
    if format.tool_format.calls(broken[1], KNOWN):
        assert unread == template.answered.replace("6", "no").replace("calc", "sum")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_was_cut_is_ended_first(made, name):
    template = TEMPLATES[name]
    format = made(template.source)
    before, after = (("assistant", "I think that"),), (("user", "Go on."),)
    cut = answer_ids(format, EXAMPLE, before, after, ended=False)
    tools = f"[AVAILABLE_TOOLS] {json.dumps([TOOL.schema])}[/AVAILABLE_TOOLS]"
    assert format.tokenizer.decode_special(cut) == template.cut.replace("TOOLS", tools)
    whole = answer_ids(format, EXAMPLE, before, after)
    if name != "harmony":  # which ends its last turn with another token
        assert cut[1:] == whole and cut[0] in format.tokenizer.stop_ids


def test_without_a_template_a_cut_turn_is_ended_too(tmp_path):
    format = PromptFormat(tool_tokenizer(tmp_path / "plain", None))
    before, after = (("assistant", "I think"),), (("user", "Go on."),)
    whole = answer_ids(format, EXAMPLE, before, after)
    cut = answer_ids(format, EXAMPLE, before, after, ended=False)
    assert cut == [format.tokenizer.eos_id, *whole]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_environment_is_given_the_calls(made, name):
    format = made(TEMPLATES[name].source)
    tokenizer = format.tokenizer
    # As it was sampled: special tokens are tokens, and the last ends the turn.
    ids = [*tokenizer.encode_special(called(format)), tokenizer.turn_end_id]
    text = message_of(format, np.array(ids), format.encode(EXAMPLE))
    first, last = environment_messages(format, EXAMPLE, [text, "I think that it is"], truncated=[1])
    assert (first["role"], first["content"]) == ("assistant", text) and "truncated" not in first
    (call,) = first["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert call["function"] == {"name": "calc", "arguments": {"expression": "2*3"}}
    assert (last["tool_calls"], last["truncated"]) == ([], True)
    (plain,) = environment_messages(format, replace(EXAMPLE, tools=()), [text])
    assert plain == {"role": "assistant", "content": text}


def test_environment_messages_have_error_of_unparsed_call(made):
    format = made(TEMPLATES["hermes"].source)
    (message,) = environment_messages(format, EXAMPLE, ["<tool_call>{</tool_call>"])
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "", "arguments": {}}
    assert call["error"].startswith("the call cannot be read: it is no JSON (")


def test_several_calls_are_answered_in_their_order(made):
    two = [*SAID, Call("calc", {"expression": "7"})]
    for name in ("kimi", "mistral", "llama"):
        format = made(TEMPLATES[name].source)
        messages = (("assistant", called(format, two)), ("tool", "6"), ("tool", "7"))
        turns = attach_calls(format.tool_format, KNOWN, messages)
        ids = [call["id"] for call in turns[0]["tool_calls"]]
        assert [turn["tool_call_id"] for turn in turns[1:]] == ids and len(set(ids)) == 2
        # Also where the template takes one call alone.
        written = format.tokenizer.decode_special(
            answer_ids(format, EXAMPLE, messages[:1], messages[1:])
        )
        assert written.index("6") < written.index("7") and written.count("call0") in (0, 2)


def test_a_prompt_that_opens_reasoning_opens_the_message(made):
    source = TEMPLATES["hermes"].source.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    format = made(source)
    tokenizer, prompt = format.tokenizer, format.encode(EXAMPLE)
    ids = np.array(tokenizer.encode_special(f"so {called(format)}"))
    text = message_of(format, ids, prompt)
    assert text.startswith("<think>\nso ")
    (message,) = environment_messages(format, EXAMPLE, [text])
    assert message["tool_calls"] == []
    after = answer_ids(format, EXAMPLE, (("assistant", "x"),), (("tool", "6"),))
    assert message_of(format, ids, [*prompt, *ids.tolist(), *after]) == text


@pytest.mark.parametrize("name", TEMPLATES)
def test_gold_turns_call_as_the_checkpoint_does(made, name):
    turns = (("assistant", "@calc 2*3"), ("tool", "6"), ("assistant", "6"))
    format = made(TEMPLATES[name].source)
    ids, imitated = reference_conversation(format, replace(EXAMPLE, turns=turns))
    tokenizer = format.tokenizer
    first = ids[: imitated.index(False)]
    assert first[-1] in tokenizer.stop_ids
    assert message_of(format, np.array(first)) == called(format)
    # Special tokens of the format are tokens.
    spelled = [token for token in SPECIAL if token in called(format)]
    assert {tokenizer.special_tokens[token] for token in spelled} <= set(first)


def test_a_template_that_does_not_write_tools_is_refused(made):
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    silent = "{{ 'There are tools.' if tools else '' }}" + plain
    for source in (plain, silent):
        format = made(source)
        with pytest.raises(
            ValueError, match=r"the chat template does not write tools \(calc\), so"
        ):
            format.encode(EXAMPLE)
        with pytest.raises(
            ValueError, match=r"the chat template does not write tools \(calc\), so"
        ):
            format.check_tools(EXAMPLE)
        assert format.encode(replace(EXAMPLE, tools=()))


def test_a_format_that_is_not_known_is_refused(made):
    shown = "{{ tools | tojson if tools else '' }}"
    plain = (
        shown + "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    called = plain.replace("'<|im_end|>'", "(m.tool_calls or []) | tojson + '<|im_end|>'")
    # Marks of a format in which it does not write calls.
    other = "{{ '<tool_call>' if false }}" + called
    for source in (plain, called, other):
        format = made(source)
        assert format.encode(EXAMPLE)
        with pytest.raises(ValueError, match=r"calls tools \(calc\) in an unknown format"):
            format.check_tools(EXAMPLE)


def test_a_template_that_takes_no_answers_of_tools_is_refused(made):
    source = TEMPLATES["hermes"].source.replace(
        "'tool' %}", "'tool' %}{{ raise_exception('no tools here') }}"
    )
    with pytest.raises(ValueError, match=r"template rejects the messages .* no tools here"):
        made(source).check_tools(EXAMPLE)
    endless = (
        TEMPLATES["hermes"]
        .source.replace("{{ '<|im_end|>\\n' }}{% endif %}{% endfor", "{% endif %}{% endfor")
        .replace("<|im_end|>", "")
    )
    with pytest.raises(ValueError, match="ends a tool call without an end-of-turn token"):
        made(endless).check_tools(EXAMPLE)


def test_nothing_is_asked_of_a_policy_without_a_template(tmp_path):
    format = PromptFormat(tool_tokenizer(tmp_path / "plain", None))
    format.check_tools(EXAMPLE)
    assert format.tool_format is None and format.encode(EXAMPLE)
    assert environment_messages(format, EXAMPLE, ["@calc 2*3"]) == [
        {"role": "assistant", "content": "@calc 2*3"}
    ]
    assert Conversation.from_pairs((("user", "?"),)).tools is None
