"""Conversations as rows: their columns, what is too long, and what is sampled to be shown."""

from dataclasses import replace

import numpy as np
import pytest
from chat_checkpoint import TURN, chat_tokenizer
from chat_records import ANSWERS, RECORDS, TEMPLATE
from command_runs import MICRO
from programs import mesh_of

from jrl.recipes import Sft
from jrl.tasks.data.chats import Chats, chat_of
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.split import HeldOut
from jrl.tasks.task import CompletionText
from jrl.text.chat import ChatTemplate
from jrl.text.loss_mask import ChatFormat
from jrl.text.prompt_format import special_text_of, text_of
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.setup.chat_rows import EXTRA_TOKENS, chat_rows, sampled_lengths
from moe.ops.zigzag import ZigzagLayout

PAIRS = [("a", "b"), ("aa", "b"), ("aaa", "bb"), ("aaaaaa", "b"), ("ab", "bbb")]
# Beginning, question, answer, end.
LENGTHS = [4, 5, 7, 9, 7]


def chat_list(pairs=PAIRS):
    return [
        chat_of({"prompt": prompt, "completion": said}, f"f:{n}", index=n)
        for n, (prompt, said) in enumerate(pairs)
    ]


def chats_of(pairs=PAIRS):
    return Chats("f", chat_list(pairs), 0, HeldOut(count=2))


FORMAT = ChatFormat(Tokenizer.train_characters("ab"))


def rows_of(chats, layout="dp1", positions=None, **settings):
    config = (
        MICRO
        if positions is None
        else MICRO.__class__(**{**vars(MICRO), "max_positions": positions})
    )
    return chat_rows(chats, FORMAT, Sft(**settings).supervision, config, mesh_of(layout))


def test_a_row_has_its_first_token_before_all_columns_that_are_learned():
    chats = chats_of()
    rows = rows_of(chats)
    assert (rows.before, rows.after, rows.dropped, rows.truncated) == (1, 8, 0, 0)
    assert {n: len(own.ids) for n, own in rows.encoded.items()} == dict(enumerate(LENGTHS))
    third = next(chat for chat in chats.chats if chat.index == 2)
    batch = rows.batch([third], 2, 0, mesh_of("dp1"))
    a, b = FORMAT.tokenizer.encode("a")[0], FORMAT.tokenizer.encode("b")[0]
    np.testing.assert_array_equal(batch.tokens, [[1, a, a, a, b, b, 2, 0, 0], [0] * 9])
    learned = [n in (4, 5, 6) for n in range(9)]
    np.testing.assert_array_equal(batch.mask, [learned, [False] * 9])
    np.testing.assert_array_equal(batch.valid, [[n < 7 for n in range(9)], [False] * 9])
    tokens, counted = rows.counts([third])
    assert (tokens.tolist(), counted.tolist()) == ([7], [3])


def test_what_is_too_long_is_left_out_or_cut():
    chats = chats_of()
    rows = rows_of(chats, max_length=7)
    assert (rows.dropped, rows.truncated, len(chats.chats), rows.after) == (1, 0, 4, 6)
    cut = rows_of(chats_of(), max_length=6, overlong="truncate")
    # Of nine tokens the first seven are context: nothing is left to learn.
    assert (cut.dropped, cut.truncated) == (1, 2)
    assert [len(cut.encoded[n].ids) for n in (2, 4)] == [6, 6]
    assert cut.encoded[4].loss_mask.tolist() == [False] * 3 + [True] * 3
    assert rows_of(chats_of(), positions=7).dropped == 1
    with pytest.raises(ValueError, match="max_length=9 is more than the 8 positions"):
        rows_of(chats_of(), positions=8, max_length=9)


@pytest.mark.parametrize("layout", ["tp2", "cp2", "cp2 tp2", "cp4"])
def test_any_number_of_rows_divides_over_the_devices(layout):
    mesh = mesh_of(layout)
    rows = rows_of(chats_of(), layout)
    assert rows.after >= 8
    for columns in (rows.before, rows.after):
        for number in (1, 2, 3):
            tokens = ZigzagLayout(((number, columns),), mesh.size(mesh.cp)).num_tokens
            assert tokens % mesh.size(mesh.sequence) == 0


def test_lengths_of_what_is_sampled_are_those_of_the_held_out_ones():
    chats = chats_of()
    rows = rows_of(chats)
    held = [chats.heldout(n) for n in range(2)]
    prompt = max(1 + len(chat.prompt) for chat in held)
    answer = max(len(chat.answer) + 1 for chat in held)
    given = chats, rows, MICRO
    assert sampled_lengths(*given, None) == (prompt, answer + EXTRA_TOKENS)
    assert sampled_lengths(*given, 3) == (prompt, 3)
    with pytest.raises(ValueError, match="response_length=0 must be at least 1"):
        sampled_lengths(*given, 0)
    # A long prompt of one takes nothing of the turn of another.
    pairs = [("a" * 30, "b"), ("a", "b" * 100), ("aa", "ba"), ("ab", "b")]
    for positions, room in ((None, 26), (140, 8), (110, 0)):
        config = replace(MICRO, max_positions=positions)
        apart = chat_list(pairs)
        chats = Chats("f", apart[2:], 0, None, apart[:2])
        rows = rows_of(chats, positions=positions)
        assert sampled_lengths(chats, rows, config, None) == (31, 101 + room)


@pytest.mark.parametrize("name", RECORDS)
def test_a_turn_is_sampled_and_compared_as_it_is_learned(name, tmp_path):
    """With its reasoning, its calls and its end, which are no part of the answer's content."""
    tokenizer = chat_tokenizer(tmp_path, chat_template=TEMPLATE)
    format = ChatFormat(tokenizer, ChatTemplate(tokenizer), last=True)
    record, fields = RECORDS[name][0], Fields(answer=ANSWERS.get(name, "answer"))
    others = [{"prompt": f"{n}?", "completion": "1"} for n in range(2)]
    chats = [
        chat_of(each, f"f:{n}", fields, last=True, index=n)
        for n, each in enumerate([record, *others])
    ]
    task = Chats("f", chats[1:], 0, None, chats[:1])
    rows = chat_rows(task, format, Sft().supervision, MICRO, mesh_of("dp1"))
    own = rows.encoded[0]
    said = len(own.ids) - own.context
    assert own.loss_mask[own.context :].all() and own.turn_length == said
    assert sampled_lengths(task, rows, MICRO, None) == (own.context, said + max(-(-said // 4), 16))
    given = tokenizer, own.ids[own.context :]
    text = CompletionText(text_of(*given), special_text_of(*given))
    held = task.heldout(0)
    assert [v.score for v in task.verify([held] * 2, [text, f"{text}4"])] == [1.0, 0.0]
    # As samples show it.
    assert f"{held.answer}{TURN}" == RECORDS[name][2]
    assert task.examples[-1].answer == held.answer


def test_of_several_turns_the_first_is_sampled():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    chats = [
        chat_of({"messages": [*turns, turns[0], {**turns[1], "content": "b" * n}]}, "f:1", index=n)
        for n in (90, 91)
    ]
    chats = Chats("f", chats_of().chats, 0, None, chats)
    format = ChatFormat(Tokenizer.train_characters("ab\n: usertian"))
    rows = chat_rows(chats, format, Sft().supervision, MICRO, mesh_of("dp1"))
    assert rows.encoded[90].turn_length == rows.encoded[91].turn_length == len("bb") + 1
    assert [chats.heldout(n).answer for n in range(2)] == ["bb", "bb"]
    assert sampled_lengths(chats, rows, MICRO, None)[1] < 90
