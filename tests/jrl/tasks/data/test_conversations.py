"""What conversations in records may be, and what tables add to them."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_records import RECORDS

from jrl.tasks.data.chats import chat_of, load_chats
from jrl.tasks.data.conversations import template_arguments
from jrl.tasks.data.fields import Fields, Row
from jrl.tasks.data.files import prompts_of, read_records
from jrl.tasks.data.records import example_of

USER = {"role": "user", "content": "a"}
TOOLS = [
    {"function": {"name": "move", "parameters": {"properties": {"x": {"type": "integer"}}}}},
    {"function": {"name": "speak", "parameters": {"properties": {"text": {"enum": ["a", "b"]}}}}},
]
CALLS = [
    {"function": {"name": "move", "arguments": {"x": 1, "y": 2}}},
    {"function": {"name": "speak", "arguments": {"text": "hi"}}},
    {"function": {"name": "stop", "arguments": '{"why": null}'}},
]


def row(call, tools):
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, calling], "tools": tools}


def padded(values):
    """Values as a table has them: every field of every one, those that it lacks null."""
    if all(isinstance(value, dict) or value is None for value in values):
        names = dict.fromkeys(name for value in values if value for name in value)
        columns = {n: padded([(value or {}).get(n) for value in values]) for n in names}
        rows = [{n: columns[n][at] for n in names} for at in range(len(values))]
        return [row if value is not None else None for row, value in zip(rows, values, strict=True)]
    if all(isinstance(value, list) or value is None for value in values):
        flat = padded([each for value in values for each in value or []])
        return [None if v is None else [flat.pop(0) for _ in v] for v in values]
    return values


def test_what_a_table_adds_is_absent():
    """Fields that are null in a row, however deep; a null in the JSON text of arguments is one."""
    rows = [row(CALLS[0], TOOLS[:1]), row(CALLS[1], TOOLS[1:]), row(CALLS[2], None)]
    # Arguments are of one type in a table.
    mixed = [{**each} for each in rows[:2]]
    for full, own in zip(padded(mixed), mixed, strict=True):
        assert full != own
        chat, plain = chat_of(Row(full), "f:1"), chat_of(own, "f:1")
        assert chat.conversation == plain.conversation
        assert "null" not in json.dumps([chat.conversation.turns[1]["tool_calls"], chat.tools])
    (call,) = chat_of(Row(rows[2]), "f:1").conversation.turns[1]["tool_calls"]
    assert call["function"]["arguments"] == {"why": None}
    assert str(call["function"]["arguments"]) == '{"why": null}'
    # A line of JSON says what it means.
    (call,) = chat_of(row({"name": "f", "arguments": {"x": None}}, None), "f").conversation.turns[
        1
    ]["tool_calls"]
    assert call["arguments"] == {"x": None}


def test_a_parquet_file(tmp_path):
    rows = [row(CALLS[0], TOOLS[:1]), row(CALLS[1], TOOLS[1:])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for (place, read), own in zip(
        read_records("parquet", tmp_path / "a.parquet"), rows, strict=True
    ):
        assert read["tools"] != own["tools"]
        assert chat_of(read, place).conversation == chat_of(own, place).conversation


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_of_a_table_have_the_digits_of_their_type(tmp_path, kind):
    answers = pa.array([kind.to_pandas_dtype()(0.1), None], kind)
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": answers}), tmp_path / "a.parquet")
    (place, read), (_, without) = read_records("parquet", tmp_path / "a.parquet")
    assert example_of(read, place, Fields(), answered=True).answer == "0.1"
    assert json.dumps([read["answer"], without["answer"]]) == "[0.1, null]"


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.float16(0.1)])
def test_numbers_of_numpy_have_the_digits_of_their_type(number):
    record = {"prompt": "a", "answer": number}
    assert example_of(record, "a", Fields(), answered=True).answer == "0.1"


def talk(content, role="user"):
    return {"messages": [{"role": role, "content": content}], "answer": "1"}


@pytest.mark.parametrize("name", RECORDS)
def test_examples_and_chats_ask_the_same(name):
    record = RECORDS[name][0]
    fields = Fields(answer="reward_model.answer" if "verl" in name else "answer")
    example = example_of(record, "f:1", fields, answered=True)
    chat = chat_of(record, "f:1", fields, last=True)
    assert (example.prompt, example.answer) == (chat.prompt, chat.answer)
    assert example.tools == chat.tools
    assert example.template_arguments == chat.template_arguments
    # Through a table, in which all of it may be null.
    empty = dict.fromkeys(("tools", "chat_template_kwargs", "messages", "prompt", "text"))
    assert example_of(Row({**empty, **record}), "f:1", fields).prompt == example.prompt


def test_what_a_template_writes_beside_contents_tells_prompts_apart():
    record = RECORDS["a call"][0]
    others = [record, {**record, "tools": None}, {**record, "chat_template_kwargs": {"a": 1}}]
    asked, calling, given = record["messages"]
    others.append({**record, "messages": [asked, {**calling, "tool_calls": None}, given]})
    assert len({example_of(each, "f:1").identity for each in others}) == 4
    assert len({example_of(each, "f:1").prompt for each in others}) == 1


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_parts_of_a_content_are_joined(kind):
    parts = [{"type": kind, "text": "a"}, {"text": "b"}, "c"]
    assert example_of({**talk(parts), "answer": "1"}, "f:1").prompt == "abc"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (talk([{"type": "image_url"}]), "part 1 of \"content\" is 'image_url'.*images"),
        (talk(["a", {"type": "image", "text": ""}]), "part 2 of \"content\" is 'image'.*images"),
        (talk([{"type": "reasoning", "text": "a"}]), "part 1 of \"content\" is 'reasoning'"),
        (talk(""), "\"content\" is '': it must be a text"),
        (talk("a", "asistant"), "role is 'asistant'"),
        ({"messages": [{"content": "a"}]}, "role is None"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, '"content" is None'),
        ({**talk("a"), "tools": 3}, 'field "tools" is 3: write a list'),
        ({**talk("a"), "tools": [3]}, r'field "tools" is \[3\]'),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": 3}]},
            'field "tool_calls" is 3',
        ),
        ({**talk("a"), "chat_template_kwargs": 3}, '"chat_template_kwargs" is not a JSON object'),
        (
            {**talk("a"), "chat_template_kwargs": {"messages": []}},
            "'messages', which is not a variable",
        ),
        (
            {"input": "a", "solution": "1"},
            r"""no field "prompt" \(it has 'input', 'solu.*perhaps --prompt-field input""",
        ),
        (
            {"prompt": "a", "solution": "1"},
            r"""no field "answer" \(it has 'prompt', 'solution'.*perhaps --answer-field solution""",
        ),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": 1}},
            r"perhaps --answer-field reward_model\.ground_truth",
        ),
        ({"chat": [USER], "answer": 1}, "perhaps --messages-field chat"),
    ],
)
def test_what_is_refused_in_both_stages(record, message):
    with pytest.raises(ValueError, match=message) as raised:
        example_of(record, "f:1", answered=True)
    assert str(raised.value).startswith("f:1: ") and "\n" not in str(raised.value)
    if "perhaps --answer" not in message:
        with pytest.raises(ValueError, match=message):
            chat_of(record, "f:1")


def test_a_conversation_without_an_answer_names_the_field_that_may_have_it():
    message = (
        "the assistant's turn is empty.*it has 'messages', 'solution'.*--answer-field solution"
    )
    with pytest.raises(ValueError, match=message):
        chat_of({"messages": [USER], "solution": "1"}, "f:1")


def test_records_of_public_data_sets_that_need_a_flag():
    """UltraChat has a conversation beside the prompt, Alpaca a prompt of two fields."""
    ultra = {"prompt": "Hi", "messages": [USER, {"role": "assistant", "content": "1"}]}
    for read in (chat_of, partial(example_of, answered=True)):
        with pytest.raises(ValueError, match=r'no field "answer".*--messages-field messages'):
            read(ultra, "f:1")
        with pytest.raises(
            ValueError,
            match=r"field \"input\" is '1 2', and only \"instruction\" is read: join the two",
        ):
            read({"instruction": "Add.", "input": "1 2", "output": "3"}, "f:1")
    unanswered = {"conversations": [{"from": "human", "value": "a"}]}
    with pytest.raises(ValueError, match=r'no field "answer".*with --answer-field$'):
        example_of(unanswered, "f:1", answered=True)


@pytest.mark.parametrize("system", ["", " ", None])
def test_an_empty_system_field_is_no_message(system):
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "1"}]
    chat = chat_of({"conversations": said, "system": system}, "f:1")
    assert [turn["role"] for turn in chat.conversation.turns] == ["user", "assistant"]
    chat = chat_of({"conversations": said, "system": "Count."}, "f:1")
    assert chat.conversation.turns[0] == {"role": "system", "content": "Count."}


def test_prompts_that_come_again(tmp_path):
    """As in DAPO-Math-17k: kept once and counted; sft takes all of them."""
    path = tmp_path / "a.jsonl"
    rows = [{**talk(f"{n % 3}?"), "answer": str(n % 3), "extra": n} for n in range(12)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    task = prompts_of("jsonl", str(path), 0, None, None)
    assert len(task.examples) == 3 and task.num_repeated == 9
    assert [example.record["extra"] for example in task.examples] == [0, 1, 2]
    assert len(load_chats(f"jsonl:{path}", 0).chats) == 12
    path.write_text(path.read_text() + json.dumps({**rows[1], "answer": "7"}) + "\n")
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:13: the prompt of line 2 again, .* answer \('7' here, '1' there\)",
    ):
        prompts_of("jsonl", str(path), 0, None, None)


def test_arguments_of_a_flag():
    assert template_arguments(None) == {}
    assert template_arguments('{"enable_thinking": false}') == {"enable_thinking": False}
    for text in ("{", "3", "[]", '{"add_generation_prompt": true}'):
        with pytest.raises(ValueError, match="chat_template_kwargs="):
            template_arguments(text)
