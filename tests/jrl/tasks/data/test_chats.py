"""What a record may hold to be a conversation to learn from, and which are held out."""

import json

import pytest

from jrl.tasks.data.chats import chat_of, load_chats
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.split import HeldOut

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "thinking": None}


def test_what_a_record_may_hold():
    chat = chat_of({"messages": [ASKED, SAID, ASKED, {**SAID, "content": "four"}]}, "f:1")
    assert (chat.prompt, chat.answer, len(chat.conversation.turns)) == ("2+2?", "4", 4)
    chat = chat_of({"messages": [ASKED, SAID, ASKED, {**SAID, "content": "four"}]}, "f", last=True)
    assert (chat.prompt, chat.answer) == ("user: 2+2?\nassistant: 4\nuser: 2+2?", "four")
    for record in ({"prompt": "2+2?", "completion": "4"}, {"prompt": "2+2?", "answer": 4}):
        chat = chat_of(record, "f:1")
        assert chat.conversation.turns == (ASKED, SAID) and chat.is_pair
    # As reinforcement reads it, and as tables have it: every field in every row.
    chat = chat_of({"messages": [ASKED], "answer": 4, "prompt": None, "tools": '[{"n": 1}]'}, "f:1")
    assert chat.conversation.turns == (ASKED, SAID) and chat.conversation.tools == [{"n": 1}]
    assert chat.tools == ('{"n": 1}',)
    chat = chat_of(
        {"turns": [ASKED, CALL, {"role": "tool", "content": "4"}]}, "f", Fields("", "", "turns")
    )
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert chat.conversation.turns[1] == called and chat.answer == ""


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "f:1: holds a list"),
        ({"messages": [ASKED]}, "f:1: the assistant's turn is empty"),
        ({"messages": []}, 'f:1: field "messages" is .*it must be a list'),
        (
            {"messages": [ASKED, {"role": "bot", "content": "4"}]},
            "message 2: role is 'bot'.*one of",
        ),
        ({"messages": [ASKED, "4"]}, "message 2 is '4': write"),
        ({"messages": [ASKED, {"role": "assistant"}]}, 'message 2: has no field "content"'),
        ({"messages": [ASKED, {**SAID, "content": None}]}, 'message 2: field "content" is None'),
        ({"prompt": "2+2?"}, 'f:1: has no field "answer"'),
        ({"prompt": "2+2?", "answer": None}, 'f:1: field "answer" is None'),
        ({"prompt": " ", "answer": "4"}, "f:1: field \"prompt\" is ' '"),
        ({"prompt": "2+2?", "answer": "\ud800"}, "a lone surrogate"),
        (
            {"prompt": "2+2?", "answer": "4", "tools": "{"},
            'field "tools" is a text that is not JSON',
        ),
    ],
)
def test_what_it_may_not_hold(record, message):
    with pytest.raises(ValueError, match=message):
        chat_of(record, "f:1")


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"jsonl:{path}"


def test_those_that_begin_alike_are_on_one_side(tmp_path):
    """Each of six questions is answered twice."""
    records = [{"prompt": f"{n}?", "answer": str(a)} for n in range(6) for a in (n, n + 10)]
    task = load_chats(written(tmp_path / "a.jsonl", records), 0, held_out=HeldOut(share=0.4))
    held = [task.heldout(index) for index in range(task.heldout_size)]
    passes = [[task.train(p * task.num_train + i) for i in range(task.num_train)] for p in (0, 1)]
    assert len(held) + task.num_train == 12 and len(held) % 2 == 0
    assert not {chat.prompt for chat in held} & {chat.prompt for chat in passes[0]}
    numbers = [[chat.index for chat in each] for each in passes]
    assert sorted(numbers[0]) == sorted(numbers[1]) and numbers[0] != numbers[1]
    # Of two that begin alike one may be too long.
    assert task.leave_out(lambda chat: len(chat.answer) == 1) == 6
    assert task.num_train + task.heldout_size == 6
    with pytest.raises(ValueError, match=r"of 6 conversations 6 are too long.*--overlong truncate"):
        task.leave_out(lambda chat: False)
    scored = task.verify(held, [held[0].answer + "\n", *["-"] * (len(held) - 1)])
    assert [verdict.correct for verdict in scored] == [True, *[False] * (len(held) - 1)]


def test_a_file_apart_and_what_cannot_be_split(tmp_path):
    some = [{"prompt": f"{n}?", "answer": "1"} for n in range(3)]
    spec, other = written(tmp_path / "a.jsonl", some), written(tmp_path / "b.jsonl", some[2:])
    task = load_chats(spec, 0, held_out=HeldOut(path=other.removeprefix("jsonl:")))
    assert (task.num_train, task.heldout_size, task.num_shared) == (2, 1, 1)
    assert len({chat.index for chat in task.chats}) == 3
    with pytest.raises(ValueError, match="has 1 conversations; at least 2 are needed"):
        load_chats(other, 0)
    with pytest.raises(ValueError, match="all conversations start with the same messages"):
        load_chats(written(tmp_path / "c.jsonl", [some[0], some[0]]), 0)
    with pytest.raises(ValueError, match="task='sort' has no conversations: sft trains on"):
        load_chats("sort", 0)
