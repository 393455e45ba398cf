"""Texts of records: lone surrogates in any of them, and values that are JSON text."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.conversations import template_arguments
from jrl.tasks.data.fields import Fields, Row
from jrl.tasks.data.files import read_records
from jrl.tasks.data.prompt_list import drop_repeated
from jrl.tasks.data.records import example_of

LONE, PAIR = "\ud83c", "\U0001f3b2"
USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def calling(**call):
    call = {"name": "f", "arguments": {"x": 1}, **call}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}


def talk(*turns, **record):
    return {"messages": [USER, *turns, SAID], **record}


def records_with(text):
    """A record for each text that a record may have, by the name of the field."""
    in_json = json.dumps({"x": text})
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    return {
        "prompt": {"prompt": f"a{text}", "answer": "b"},
        "answer": {"prompt": "a", "answer": f"b{text}"},
        "completion": {"prompt": "a", "completion": f"b{text}"},
        "completion's messages": {"prompt": "a", "completion": [{**SAID, "content": text}]},
        "text": {"text": f"a{text}"},
        "system": {"prompt": "a", "answer": "b", "system": f"s{text}"},
        "system_prompt": {"messages": [USER, SAID], "system_prompt": f"s{text}"},
        "content": talk({"role": "user", "content": f"a{text}"}),
        "part": talk({"role": "user", "content": [{"type": "text", "text": text}]}),
        "ShareGPT's": {"conversations": [{"from": "human", "value": text}, SAID]},
        "name": talk({"role": "tool", "content": "7", "name": text}),
        "id of a result": talk({"role": "tool", "content": "7", "tool_call_id": text}),
        "reasoning_content": talk({**SAID, "reasoning_content": text}),
        "thinking": talk({**SAID, "thinking": text}),
        "unknown field": talk({**SAID, "note": [{"deep": text}]}),
        "name of a field": talk({**SAID, text: "1"}),
        "name of a call": talk(calling(name=text)),
        "arguments": talk(calling(arguments={"x": text})),
        "deep arguments": talk(calling(arguments={"x": [{"y": [text]}]})),
        "name of an argument": talk(calling(arguments={text: 1})),
        "arguments as JSON": talk(calling(arguments=in_json)),
        "arguments as JSON with characters": talk(calling(arguments=f'{{"x": "{text}"}}')),
        "calls as JSON": talk({**calling(), "tool_calls": json.dumps([{"name": text}])}),
        "ShareGPT's call": {
            "conversations": [
                {"from": "human", "value": "a"},
                {
                    "from": "function_call",
                    "value": json.dumps({"name": "f", "arguments": {"x": text}}),
                },
            ]
        },
        "tools": talk(tools=[tool]),
        "tools as JSON": talk(tools=json.dumps([tool])),
        "entries of tools as JSON": talk(tools=[json.dumps(tool)]),
        "chat_template_kwargs": talk(chat_template_kwargs={"date": text}),
        "kwargs as JSON": talk(chat_template_kwargs=in_json),
        "messages as JSON": {"messages": json.dumps([{"role": "user", "content": text}, SAID])},
        "entry of messages as JSON": {"messages": [json.dumps({**USER, "content": text}), SAID]},
        "prompt as JSON": {"prompt": json.dumps([{**USER, "content": text}]), "answer": "b"},
    }


@pytest.mark.parametrize("name", records_with(LONE))
def test_lone_surrogate_in_any_text_is_one_line(name, tmp_path):
    path = tmp_path / "a.jsonl"
    for text in (LONE, "\udc00", f"a{LONE}b"):
        path.write_text("\n" + json.dumps(records_with(text)[name]) + "\n")
        ((location, record),) = read_records("jsonl", path)
        for parsed in (record, Row(record)):
            with pytest.raises(ValueError, match="has a lone surrogate") as raised:
                chat_of(parsed, location)
            assert str(raised.value).startswith(f"{path}:2: ")
            assert "\n" not in str(raised.value)
            str(raised.value).encode()  # can be printed
    path.write_text(json.dumps(records_with(PAIR)[name]))
    ((location, record),) = read_records("jsonl", path)
    chat_of(record, location)


def test_lone_surrogate_in_a_flag_is_one_line():
    with pytest.raises(ValueError, match=r"chat_template_kwargs=.* has a lone surrogate"):
        template_arguments('{"date": "\\ud83c"}')


MESSAGES = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "f", "arguments": {"x": None, "y": [{"z": None}]}}],
    },
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "b"},
]
TOOL = {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}
WRITTEN = [json.dumps(message) for message in MESSAGES]


def with_json():
    """The library `datasets`, if it has the type Json."""
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("datasets before 5 has no type Json")
    return datasets


def typed(json_type, **columns):
    """A table of one row with this type in place of JSON text."""
    types = {
        "messages": pa.list_(json_type),
        "tools": pa.list_(json_type),
        "extra": json_type,
        "answer": pa.string(),
    }
    arrays = {}
    for name, value in columns.items():
        storage = pa.list_(pa.string()) if name in ("messages", "tools") else pa.string()
        arrays[name] = pa.array([value], storage).cast(types[name])
    return pa.table(arrays)


@pytest.mark.parametrize("json_type", [pa.string(), pa.json_()], ids=["text", "Json"])
def test_entries_of_a_table_that_are_json(json_type, tmp_path):
    """As `datasets` writes its type Json; a null in the text is a value."""
    table = typed(json_type, messages=WRITTEN, tools=[json.dumps(TOOL)], extra='{"a": null}')
    pq.write_table(table, tmp_path / "a.parquet")
    ((place, record),) = read_records("parquet", tmp_path / "a.parquet")
    chat = chat_of(record, place)
    assert chat.conversation == chat_of({"messages": MESSAGES, "tools": [TOOL]}, "f:1").conversation
    (call,) = chat.conversation.turns[1]["tool_calls"]
    assert call["arguments"] == {"x": None, "y": [{"z": None}]}
    assert record["extra"] == ('{"a": null}' if json_type == pa.string() else {"a": None})


def test_folder_of_datasets_with_json(tmp_path):
    datasets = with_json()
    features = datasets.Features(
        {
            "messages": datasets.List(datasets.Json()),
            "tools": datasets.List(datasets.Json()),
            "chat_template_kwargs": datasets.Json(),
            "score": datasets.Value("float32"),
            "kind": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    rows = {
        "messages": [MESSAGES, MESSAGES[:1] + MESSAGES[3:]],
        "tools": [[TOOL], None],
        "chat_template_kwargs": [{"a": None}, None],
        "score": [0.1, None],
        "kind": [1, None],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.select([1, 0]).save_to_disk(str(tmp_path / "d"))
    (_, second), (place, first) = read_records("dataset", tmp_path / "d")
    plain = {name: values[0] for name, values in rows.items()}
    assert chat_of(first, place).conversation == chat_of(plain, "f:1").conversation
    assert (first["score"], first["kind"]) == (0.1, 1)
    assert all(second[name] is None for name in rows if name != "messages")
    assert chat_of(second, place).answer == "b"


def test_nulls_of_structs_are_absent_beside_json(tmp_path):
    """A message is a struct, and its arguments are of the type Json."""
    datasets = with_json()
    call = {name: datasets.Value("string") for name in ("name", "id")}
    message = {name: datasets.Value("string") for name in ("role", "content", "note")}
    message |= {"tool_calls": datasets.List({**call, "arguments": datasets.Json()})}
    features = datasets.Features({"messages": datasets.List(message)})
    dataset = datasets.Dataset.from_dict({"messages": [MESSAGES]}, features=features)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "d"))
    for kind, path in (("parquet", "a.parquet"), ("dataset", "d")):
        ((place, record),) = read_records(kind, tmp_path / path)
        assert record["messages"][0]["note"] is None
        assert (
            chat_of(record, place).conversation == chat_of({"messages": MESSAGES}, "f").conversation
        )


def test_map_of_a_table_is_an_object(tmp_path):
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )
    calls = [{"name": "f", "arguments": [("x", "1")]}]
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]]
    pq.write_table(
        pa.table({"messages": pa.array(rows, pa.list_(message))}), tmp_path / "a.parquet"
    )
    ((place, record),) = read_records("parquet", tmp_path / "a.parquet")
    (call,) = chat_of(record, place).conversation.turns[1]["tool_calls"]
    assert call["arguments"] == {"x": "1"}


@pytest.mark.parametrize("messages", [[USER], [{"role": "system", "content": "s"}, USER]])
def test_prompt_that_is_json_text_of_messages(messages):
    plain = {"prompt": messages, "completion": [SAID]}
    for text in (json.dumps(messages), "\n " + json.dumps(messages, indent=1)):
        written = {"prompt": text, "completion": json.dumps([SAID])}
        for read in (example_of, chat_of):
            assert read(written, "f:1") == read(plain, "f:1")
            assert read(written, "f:1").opening == read(plain, "f:1").opening


@pytest.mark.parametrize("text", ["[1, 2]", "[", '["role"]', '{"role": "user"}', "[a](b)", "[{x}]"])
def test_prompt_that_only_looks_like_json_is_a_text(text):
    assert example_of({"prompt": text, "answer": "1"}, "f:1").messages == ()


def test_prompt_that_is_a_list_of_python_is_refused():
    record = {"prompt": str([USER]), "answer": "1"}
    with pytest.raises(ValueError, match=r"f:1: .* begins as a list of messages and is no JSON"):
        example_of(record, "f:1")


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_text_of_a_field_is_absent(name, blank):
    assert chat_of({**talk(), name: blank}, "f:1") == chat_of(talk(), "f:1")
    calls = talk({**SAID, "tool_calls": blank})
    assert "tool_calls" not in chat_of(calls, "f:1").conversation.turns[1]


@pytest.mark.parametrize(
    ("number", "written"),
    [("5", "5"), ("0.10", "0.10"), ("-3.5", "-3.5"), ("1E+3", "1000"), ("1E-7", "0.0000001")],
)
def test_decimal_answers_keep_their_digits(number, written):
    record = {"prompt": "a", "answer": Decimal(number)}
    assert example_of(record, "f:1").answer == written
    assert chat_of(record, "f:1").answer == written


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1E+400"])
def test_decimal_answers_that_are_no_numbers_are_refused(number):
    with pytest.raises(ValueError, match=r'f:1: field "answer": .*: write it as a text'):
        example_of({"prompt": "a", "answer": Decimal(number)}, "f:1")


def test_decimal_answers_of_parquet(tmp_path):
    answers = pa.array([Decimal("0.50"), Decimal("12.00")], pa.decimal128(10, 2))
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": answers}), tmp_path / "a.parquet")
    read = [example_of(record, p) for p, record in read_records("parquet", tmp_path / "a.parquet")]
    assert [example.answer for example in read] == ["0.50", "12.00"]


def asked(answer):
    return example_of({"prompt": "a", "answer": answer}, f"f:{answer}", Fields())


@pytest.mark.parametrize(
    ("first", "second"),
    [("0.5", "1/2"), (5, "5.0"), ("1,000", 1000), (r"\frac12", 0.5), ("x", " x")],
)
def test_prompt_that_is_twice_with_equal_answers_is_kept_once(first, second):
    kept, repeated = drop_repeated([asked(first), asked(second)])
    assert (len(kept), repeated) == (1, 1) and kept[0].answer == str(first)


@pytest.mark.parametrize(
    ("first", "second"), [("0.5", "1/3"), ("5", "5.1"), ("x", "y"), ("A", "B")]
)
def test_prompt_that_is_twice_with_other_answers_is_refused(first, second):
    with pytest.raises(ValueError, match="again, with another answer"):
        drop_repeated([asked(first), asked(second)])
