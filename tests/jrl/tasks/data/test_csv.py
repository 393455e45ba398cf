"""Files as people have them: comma-separated values, and prompts under other names."""

import gzip

import pytest
from annotations import unchecked

from jrl.tasks.data.chats import chat_of, load_chats
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.files import kind_of, prompts_of, read_records
from jrl.tasks.data.records import example_of
from jrl.trainer.setup.lengths import describe_lists

TEXT = 'question,answer,level\n"2, or\n3?",2,\n4?,"4 ""four""",hard\n\n5?,5,easy\n'
ROWS = [
    ("2, or\n3?", "2", None),
    ("4?", '4 "four"', "hard"),
    ("5?", "5", "easy"),
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TEXT.encode()),
        ("a.csv", b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").replace("or\r", "or").encode()),
        ("a.csv.gz", gzip.compress(TEXT.encode())),
        ("a.tsv", TEXT.replace(",", "\t").replace("2\t or", "2, or").encode()),
    ],
    ids=["lf", "bom-crlf", "gzip", "tabs"],
)
def test_csv_rows_are_records_with_the_line_where_they_begin(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    assert kind_of(path) == "csv"
    located = list(read_records("csv", path))
    assert [tuple(record.values()) for _, record in located] == ROWS
    assert [int(location.rpartition(":")[2]) for location, _ in located] == [2, 4, 6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\n1,2,3\n", r"a\.csv:2: has 3 cells under 2 names: quote a cell"),
        (b"prompt,answer\n1?,1\n2\n", r"a\.csv:3: has 1 cells under 2 names"),
        (b'prompt,answer\n"1?,1\n', r"a\.csv:2: is not CSV \(unexpected end of data\)"),
        (b'prompt,answer\n"1"?,1\n', r"a\.csv:2: is not CSV"),
        (b"prompt;answer\n1?;1\n", r"has one column, 'prompt;answer': separate columns by ',', no"),
        (b"prompt,prompt\n1?,1\n", r"the column name 'prompt' is empty or comes twice"),
        (b"prompt,\n1?,1\n", r"the column name '' is empty or comes twice"),
        (b"prompt\n\xff\n", r"a\.csv: is not UTF-8"),
        (b"PAR1", r"is a Parquet file: give parquet:"),
    ],
)
def test_csv_that_cannot_be_read_is_one_line(content, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records("csv", path))


def test_csv_cells_longer_than_the_default_limit_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,answer\n{'a' * 200_000},1\n")
    ((_, record),) = read_records("csv", path)
    assert len(record["prompt"]) == 200_000


@pytest.mark.parametrize("name", ["question", "problem", "instruction", "query"])
def test_prompt_is_read_from_its_common_names(name):
    record = {name: "2 + 2?", "answer": "4", "level": "easy"}
    example = example_of(record, "f:1", answered=True)
    assert example == example_of({"prompt": "2 + 2?", "answer": "4", "level": "easy"}, "f:1")
    assert example.record == {"answer": "4", "level": "easy"}
    assert chat_of(record, "f:1").prompt == "2 + 2?"


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "a", "question": "b"}, "a"),
        ({"question": "b", "messages": [{"role": "user", "content": "a"}]}, "a"),
        ({"prompt": None, "question": "a", "problem": None}, "a"),
        # The answer's field is no prompt.
        ({"query": "a", "instruction": "1"}, "a"),
    ],
)
def test_prompt_has_one_source(record, prompt):
    fields = Fields(answer="instruction" if "instruction" in record else "answer")
    assert example_of({"answer": "1", **record}, "f:1", fields).prompt == prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a", "problem": "b"}, "has 'question' and 'problem', and a prompt is one"),
        ({"instruction": "Add.", "input": "1 2"}, 'field "input" is .*: join the two in the file'),
        ({"input": "a"}, 'has no field "prompt"'),
    ],
)
def test_prompt_that_is_not_clear_is_refused(record, message):
    for read in (example_of, chat_of):
        with pytest.raises(ValueError, match=message):
            read({"answer": "1", **record}, "f:1")


def test_named_prompt_field_is_the_only_one():
    with pytest.raises(ValueError, match='has no field "body"'):
        example_of({"question": "a", "answer": "1"}, "f:1", Fields(prompt="body"))


@unchecked()  # lists of prompts, not tasks
def test_a_line_says_from_which_field_prompts_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer\n2?,2\n3?,3\n4?,4\n")
    line = 'prompts are read from the field "question" (--prompt-field)'
    for task in (prompts_of("csv", path, 0), load_chats(f"csv:{path}", 0)):
        assert line in describe_lists(task, 0, 16)
    named = prompts_of("csv", path, 0, Fields(prompt="question"))
    assert describe_lists(named, 0, 16) == []
