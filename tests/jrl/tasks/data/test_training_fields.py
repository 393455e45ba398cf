"""Fields of records about training, tools and turns, in the formats of other libraries."""

import json
from dataclasses import replace

import pytest
from chat_checkpoint import TEMPLATE, chat_tokenizer
from chat_records import TEMPLATE as WHOLE_TEMPLATE

from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.records import example_of
from jrl.text.chat import ChatTemplate
from jrl.text.loss_mask import ChatFormat, encode_chat

ASKED, AGAIN = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
BAD, GOOD = {"role": "assistant", "content": "BAD"}, {"role": "assistant", "content": "good"}
TAGGED = """\
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" %}{% generation %}{{ m.content + "<|im_end|>" }}{% endgeneration %}
{%- else %}{{ m.content + "<|im_end|>" }}{% endif %}{{ "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
COMMENTED = "{# Mark turns by {% generation %} tags. #}" + TEMPLATE
# Two spans for each turn, as of a template that marks reasoning and answer apart.
TWICE = TAGGED.replace(
    "{{ m.content +", "{{ m.content[:1] }}{% endgeneration %}{% generation %}{{ m.content[1:] +", 1
)
# As a template that has no tags in the branch of calls.
ONCE = TAGGED.replace('"assistant" %}', '"assistant" and m.content == "good" %}')
KINDS = {"plain": TEMPLATE, "tagged": TAGGED, "commented": COMMENTED, "twice": TWICE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def format_of(tokenizer, template):
    if template is None:
        return ChatFormat(tokenizer.with_usage(replace(tokenizer.usage, chat_template=None)))
    made = tokenizer.with_usage(replace(tokenizer.usage, chat_template=template))
    return ChatFormat(made, ChatTemplate(made))


def learned(format, record, *, last=False):
    encoded = encode_chat(format, chat_of(record, "f:1", last=last), last=last)
    text = format.tokenizer.decode_special(encoded.ids[encoded.loss_mask].tolist())
    return text.replace(format.tokenizer.decode_special([int(encoded.ids[-1])]), "|")


def talk(first=None, second=None, **record):
    messages = [ASKED, {**BAD, **(first or {})}, AGAIN, {**GOOD, **(second or {})}]
    return {"messages": messages, **record}


YES = {
    "weight": (1, 1.0, True),
    **{name: (True, 1) for name in ("train", "training", "trainable", "loss")},
    **{name: (1, 1.0) for name in ("loss_scale", "loss_weight", "loss_mask", "step_loss_mask")},
    "masked": (False, 0),
}
NO = {name: tuple(type(value)(not value) for value in values) for name, values in YES.items()}
SAID = [(name, no, yes) for name in YES for no, yes in zip(NO[name], YES[name], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_mask_is_what_fields_about_training_say(kind, tokenizer):
    format = format_of(tokenizer, KINDS[kind])
    for name, no, yes in SAID:
        for first, second, wanted in (
            ({name: no}, {name: yes}, "good|"),
            ({name: no}, {}, "good|"),
            ({name: yes}, {name: no}, "BAD|"),
            ({name: yes}, {name: yes}, "BAD|good|"),
            ({name: None}, {}, "BAD|good|"),
        ):
            assert learned(format, talk(first, second)) == wanted, (name, no, yes)


def test_loss_mask_without_a_template(tokenizer):
    format = format_of(tokenizer, None)
    assert learned(format, talk({"weight": 0}, {"weight": 1})) == "good|"
    assert learned(format, talk()) == "BAD|good|"


def test_samples_begin_at_the_first_trained_turn(tokenizer):
    chat = chat_of(talk({"weight": 0}), "f:1")
    assert (chat.answer, len(chat.opening)) == ("good", 3)
    format = format_of(tokenizer, TEMPLATE)
    encoded = encode_chat(format, chat)
    assert format.encode(chat) == encoded.ids[: encoded.context].tolist()
    assert "BAD" in tokenizer.decode(format.encode(chat))


def test_training_fields_do_not_reach_templates(tokenizer):
    format = format_of(tokenizer, "{{ messages | tojson }}")
    text = format.template.write(chat_of(talk({"weight": 0}), "f:1").conversation)
    assert json.loads(text) == talk()["messages"]


REFUSED = [
    (talk({"weight": 0.5}), 'message 2: field "weight" is 0.5: write 0 or 1'),
    (talk({"weight": -1}), "write 0 or 1"),
    (talk({"train": "no"}), "field \"train\" is 'no': write 0 or 1"),
    (talk({"loss_mask": [0, 1]}), "write 0 or 1"),
    (talk({"weight": 0, "train": True}), 'has "weight" 0 and "train" True, which contradict'),
    (talk({"train_detail": [{"begin_offset": 0}]}), 'message 2: field "train_detail".*is not read'),
    (talk({"mask": True}), 'field "mask" is True, and is not read'),
    (talk({"token_weights": [1]}), 'field "token_weights".*is not read'),
    (talk({"supervised": False}), 'field "supervised" is False, and is not read'),
    (talk({"ignore": True}), 'field "ignore" is True, and is not read'),
    (talk({"trained": False}), 'field "trained" is False, and is not read'),
    (talk({"eot": False}), 'field "eot" is False, which leaves the turn open'),
    (talk({"prefix": True}), 'field "prefix" is True, which leaves the turn open'),
    (
        {"messages": [{**ASKED, "train": True}, GOOD]},
        "message 1: field \"train\" is True for a message of role 'user'",
    ),
    (talk({"weight": 0}, {"weight": 0}), "f:1: the record says not to train on any"),
    (talk(weight=0), 'f:1: field "weight" is 0, so that nothing'),
    (talk(weight=0.5), 'field "weight" is 0.5: write 0 or 1'),
    (talk(loss_mask=[0, 1]), "write 0 or 1"),
    ({"prompt": "a", "completion": "b", "label": False}, 'field "label" is False'),
    (talk(kto_tag=False), 'field "kto_tag" is False'),
    (talk(input_ids=[1]), 'has "input_ids" of another tokenizer'),
    (talk(assistant_masks=[1]), "of another tokenizer"),
    (talk(mask="Assistant"), "field \"mask\" is 'Assistant'"),
]
READ = [
    talk(weight=1),
    talk(mask="User", label=None),
    talk(label=True),
    talk({"train_detail": None, "eot": True, "prefix": False, "weights": []}),
    {"messages": [{**ASKED, "weight": 0, "train": False}, GOOD]},
    {"messages": [{**ASKED, "loss": True}, GOOD]},  # has no effect there, as ms-swift says
    {
        "conversations": [
            {"from": "User", "value": "a", "weight": 0.0},
            {"from": "GPT", "value": "b"},
        ]
    },
]


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_training_fields_that_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        chat_of(record, "f:1")


@pytest.mark.parametrize("record", READ)
def test_training_fields_that_change_nothing(record):
    assert chat_of(record, "f:1").answer in ("BAD", "good", "b")


def test_last_turn_that_is_not_trained_on(tokenizer):
    format = format_of(tokenizer, TEMPLATE)
    assert learned(format, talk({"weight": 0}), last=True) == "good|"
    with pytest.raises(ValueError, match="not to train on the assistant's last turn"):
        chat_of(talk({}, {"weight": 0}), "f:1", last=True)


def test_reference_answer_that_is_not_trained_on():
    with pytest.raises(ValueError, match="f:1: the assistant's last turn is the reference answer"):
        example_of(talk({}, {"weight": 0}), "f:1")
    history = example_of(talk({"weight": 0}), "f:1")
    assert history == example_of(talk(), "f:1")
    assert all("trained" not in message for message in history.opening)


def test_generation_tags_around_some_turns_are_refused(tokenizer):
    format = format_of(tokenizer, ONCE)
    with pytest.raises(ValueError, match=r"f:1: .* tags around 1 of the assistant's 2 turns"):
        encode_chat(format, chat_of(talk(), "f:1"))
    assert learned(format, talk(), last=True) == "good|"


UNREAD = {
    "history": [["a", "b"]],
    "functions": [{"name": "f"}],
    "enable_thinking": False,
    "images": ["a.png"],
    "image": {"path": "a.png"},
    "videos": ["a.mp4"],
    "audios": ["a.wav"],
}


@pytest.mark.parametrize("name", UNREAD)
def test_fields_that_would_change_a_prompt_are_refused(name):
    plain = {"prompt": "a", "answer": "1"}
    for read in (example_of, chat_of):
        with pytest.raises(ValueError, match=f'f:1: field "{name}" is .*, which is not read: '):
            read({**plain, name: UNREAD[name]}, "f:1")
        for empty in (None, [] if name != "enable_thinking" else None, ""):
            assert read({**plain, name: empty}, "f:1").prompt == "a"
    # A field that the user names is what he says.
    named = {"history": "1", **plain, name: UNREAD[name]}
    assert example_of({**named, name: "7"}, "f:1", Fields(answer=name)).answer == "7"


@pytest.mark.parametrize("name", ["system", "tools", "history"])
def test_text_beside_fields_of_a_conversation_is_refused(name):
    with pytest.raises(ValueError, match=f'f:1: .*"{name}"'):
        chat_of({"text": "a", name: [["a", "b"]]}, "f:1")
    assert chat_of({"text": "a", name: None}, "f:1").text == "a"


def test_alpaca_and_steered_records_are_refused():
    record = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    fields = Fields("instruction", "output")
    with pytest.raises(ValueError, match='field "input" is \'1, 2\', and only "instruction"'):
        chat_of(record, "f:1", fields)
    assert chat_of({**record, "input": ""}, "f:1", fields).prompt == "Add."
    with pytest.raises(ValueError, match="field \"type\" is 'VALUE_TO_TEXT'"):
        chat_of(talk(type="VALUE_TO_TEXT"), "f:1")


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_system_field_comes_before_all_forms_of_a_prompt(name):
    forms = [
        {"prompt": "a", "answer": "1"},
        {"prompt": [ASKED], "answer": "1"},
        {"messages": [ASKED], "answer": "1"},
        {"conversations": [{"from": "human", "value": "a"}], "answer": "1"},
    ]
    for record in forms:
        for read in (example_of, chat_of):
            opening = read({**record, name: "Count."}, "f:1").opening
            assert [message["role"] for message in opening] == ["system", "user"]
            assert opening[0]["content"] == "Count."
    first = {"role": "system", "content": "Count."}
    same = {"messages": [first, ASKED], "answer": "1", name: "Count."}
    assert len(example_of(same, "f:1").opening) == 2
    with pytest.raises(ValueError, match="and the first message is another system message"):
        example_of({**same, name: "Sort."}, "f:1")
    with pytest.raises(ValueError, match=f'field "{name}" is 3: it must be a text'):
        example_of({**forms[0], name: 3}, "f:1")


CALL = {"name": "f", "arguments": {"x": 1}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "content": "7"}
# As templates of base checkpoints, which know roles and contents only.
USERS = """\
{%- for m in messages %}{%- if m.role in ("user", "assistant") %}
{{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
ALL_ROLES = USERS.replace('m.role in ("user", "assistant")', "true")
UNWRITTEN = [
    ([ASKED, CALLING, ANSWERED, GOOD], "tool_calls"),
    ([ASKED, {**CALLING, "content": "I call."}, ANSWERED, GOOD], "tool_calls"),
    ([ASKED, {**BAD, "tool_calls": [{"function": CALL}]}], "tool_calls"),
    ([ASKED, {**BAD, "function_call": CALL}], "function_call"),
    ([ASKED, {**GOOD, "reasoning_content": "hm"}], "reasoning_content"),
    ([ASKED, {**GOOD, "content": None, "reasoning_content": "hm"}], "reasoning_content"),
    ([ASKED, {**GOOD, "thinking": "hm"}], "thinking"),
    ([ASKED, {**GOOD, "reasoning": "hm"}, AGAIN, GOOD], "reasoning"),
]


@pytest.mark.parametrize(("messages", "field"), UNWRITTEN)
def test_fields_that_the_template_does_not_write_are_refused(messages, field, tokenizer):
    for template in (ALL_ROLES, TAGGED):
        with pytest.raises(ValueError, match=f"f:1: the chat template does not write {field}"):
            encode_chat(format_of(tokenizer, template), chat_of({"messages": messages}, "f:1"))


# As templates that write the first call alone.
FIRST_CALL = ALL_ROLES.replace(
    "m.content +", '(m.content or "") + (m.tool_calls[0] | tojson if m.tool_calls else "") +'
)


def test_second_call_that_the_template_does_not_write_is_refused(tokenizer):
    def calling(number):
        calls = [{"name": "f", "arguments": {"x": n}} for n in range(number)]
        turns = [ASKED, {**CALLING, "tool_calls": calls}, *[ANSWERED] * number, GOOD]
        return chat_of({"messages": turns}, "f:1")

    first, whole = format_of(tokenizer, FIRST_CALL), format_of(tokenizer, WHOLE_TEMPLATE)
    encode_chat(first, calling(1))
    encode_chat(whole, calling(2))
    for number in (2, 3):
        with pytest.raises(ValueError, match="does not write a second entry of tool_calls"):
            encode_chat(first, calling(number))


def test_content_that_the_template_leaves_out_beside_calls_is_refused(tokenizer):
    source = FIRST_CALL.replace('(m.content or "")', '(m.content if not m.tool_calls else "")')
    record = {"messages": [ASKED, {**CALLING, "content": "I call."}, ANSWERED, GOOD]}
    quiet = {"messages": [ASKED, {**CALLING, "content": "\n"}, ANSWERED, GOOD]}
    format = format_of(tokenizer, source)
    assert learned(format, quiet).endswith("|good|")
    # As a turn that is not trained on, it is left to the template.
    assert learned(format, record, last=True) == "good|"
    with pytest.raises(ValueError, match="does not write a content beside tool_calls"):
        encode_chat(format, chat_of(record, "f:1"))
    whole = learned(format_of(tokenizer, WHOLE_TEMPLATE), record)
    assert "I call." in whole and "<tool_call>" in whole


def test_fields_that_the_template_writes_are_learned(tokenizer):
    format = format_of(tokenizer, WHOLE_TEMPLATE)
    record = {"messages": [ASKED, CALLING, ANSWERED, {**GOOD, "reasoning_content": "hm"}]}
    assert learned(format, record) == '<tool_call>f {"x": 1}</tool_call>|<think>hm</think>good|'
    # Of a turn that is not trained on, reasoning is left to the template.
    plain = {"messages": [ASKED, {**BAD, "thinking": "hm", "weight": 0}, AGAIN, GOOD]}
    assert learned(format, plain) == "good|"
    both = {"messages": [ASKED, {**GOOD, "reasoning_content": "hm", "thinking": "hm"}]}
    assert learned(format, both) == "<think>hm</think>good|"


ITEMS = [{"type": "reasoning.text", "text": "hm"}]
NO_TEXTS = [
    ("reasoning_content", ITEMS),
    ("reasoning", {"text": "hm"}),
    ("thinking", ["hm"]),
    ("reasoning_details", ITEMS),
    ("thinking_blocks", ITEMS),
]


@pytest.mark.parametrize(("field", "value"), NO_TEXTS)
def test_reasoning_that_is_no_text_is_refused(field, value, tokenizer):
    messages = [ASKED, {**GOOD, field: value}]
    for template in (ALL_ROLES, WHOLE_TEMPLATE, None):
        with pytest.raises(ValueError, match=f"f:1: {field} is .*, and is not read: write the"):
            encode_chat(format_of(tokenizer, template), chat_of({"messages": messages}, "f:1"))
    # Empty, or of a turn that is not trained on, it changes nothing.
    format = format_of(tokenizer, ALL_ROLES)
    assert learned(format, {"messages": [ASKED, {**GOOD, field: []}]}) == "good|"
    assert learned(format, talk({field: value, "weight": 0})) == "good|"


def test_items_of_reasoning_beside_its_text_are_passed_over(tokenizer):
    said = {**GOOD, "reasoning_content": "hm", "reasoning_details": ITEMS}
    format = format_of(tokenizer, WHOLE_TEMPLATE)
    assert learned(format, {"messages": [ASKED, said]}) == "<think>hm</think>good|"


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_roles_that_the_template_does_not_write_are_refused(role, tokenizer):
    message = {"role": role, "content": "Count."}
    messages = [ASKED, BAD, message] if role == "tool" else [message, ASKED]
    record = {"messages": [*messages, GOOD]}
    error = f"f:1: the chat template does not write messages of role '{role}'"
    format = format_of(tokenizer, USERS)
    with pytest.raises(ValueError, match=error):
        encode_chat(format, chat_of(record, "f:1"))
    with pytest.raises(ValueError, match=error):
        format.encode(example_of(record, "f:1"))
    assert learned(format_of(tokenizer, ALL_ROLES), record, last=True) == "good|"


def test_turn_of_which_only_the_end_is_left_is_refused(tokenizer):
    """As of a template that rejects the probe and drops the calls of this record."""
    template = ALL_ROLES.replace(
        "m.content +",
        "(raise_exception('no') if 'probe' in (m.tool_calls | tojson if m.tool_calls else '') "
        "else m.content) +",
    )
    record = {"messages": [ASKED, CALLING, ANSWERED, GOOD]}
    with pytest.raises(ValueError, match="f:1: the chat template writes nothing of one of"):
        encode_chat(format_of(tokenizer, template), chat_of(record, "f:1"))


def test_reasoning_without_a_template_is_refused(tokenizer):
    record = {"messages": [ASKED, {**GOOD, "reasoning_content": "hm"}]}
    with pytest.raises(ValueError, match="f:1: it has reasoning_content, and the model no chat"):
        encode_chat(format_of(tokenizer, None), chat_of(record, "f:1"))
