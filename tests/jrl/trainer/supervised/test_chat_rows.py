"""Conversations as rows: their columns, what is too long, and what is sampled to be shown."""

import numpy as np
import pytest
from command_runs import MICRO
from programs import mesh_of

from jrl.recipes import Sft
from jrl.tasks.data.chats import Chats, chat_of
from jrl.tasks.data.split import HeldOut
from jrl.text.learned import ChatFormat
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.supervised.rows import chat_rows, sampled_lengths
from moe.tokens.zigzag import ZigzagLayout

PAIRS = [("a", "b"), ("aa", "b"), ("aaa", "bb"), ("aaaaaa", "b"), ("ab", "bbb")]
# Beginning, question, answer, end.
LENGTHS = [4, 5, 7, 9, 7]


def chats_of(pairs=PAIRS):
    chats = [
        chat_of({"prompt": prompt, "completion": said}, f"f:{n}", number=n)
        for n, (prompt, said) in enumerate(pairs)
    ]
    return Chats("f", chats, 0, HeldOut(count=2))


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
    third = next(chat for chat in chats.chats if chat.number == 2)
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
    assert cut.encoded[4].learned.tolist() == [False] * 3 + [True] * 3
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
    given = chats, rows, FORMAT, MICRO
    assert sampled_lengths(*given, None) == (prompt, -(-5 * answer // 4))
    assert sampled_lengths(*given, 3) == (prompt, 3)
    with pytest.raises(ValueError, match="response_length=0 must be at least 1"):
        sampled_lengths(*given, 0)
