"""Text of a choice: the pieces, however the tokens are dealt out, are the text of all of them, and
nothing of a stop is ever shown."""

import random

import pytest
from chat_checkpoint import chat_tokenizer

from jrl.serving.api.output import Output
from jrl.serving.transcript import Detokenizer, StopStrings, TokenStrings, Transcript
from jrl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level: most characters beyond ASCII are several tokens."""
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


TEXT = "How many? \u20ac5, \U0001f600 na\u00efve \u4e2d\u6587 pens."


def dealt(ids, sizes):
    """The ids in parts, of which the last is not empty."""
    ids, parts = list(ids), []
    for size in sizes:
        if len(ids) > size:
            parts.append(ids[:size])
            ids = ids[size:]
    return [*parts, ids]


@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_the_text_whatever_comes_together(tokenizer, seed):
    draw = random.Random(seed)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT), "no character is several tokens"
    unfolding, shown = Detokenizer(tokenizer.decode), ""
    for part in dealt(ids, [draw.randrange(4) for _ in range(30)]):
        piece = unfolding.add(part)
        assert "\ufffd" not in piece, "a part of a character was shown"
        shown += piece
        assert TEXT.startswith(shown)
    assert shown + unfolding.rest() == TEXT


@pytest.mark.parametrize("size", [1, 3, 100])
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_reads_them(tokenizer, size):
    draw = random.Random(4)
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    ids = draw.choices(ids, k=200)
    whole = tokenizer.decode(ids)
    assert whole.count("\ufffd") > 20
    unfolding = Detokenizer(tokenizer.decode)
    parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    assert "".join(map(unfolding.add, parts)) + unfolding.rest() == whole


def test_a_completion_keeps_the_blank_that_it_begins_with():
    """A tokenizer that drops a blank at the beginning of a text reads it after the prompt."""

    class Words(Tokenizer):
        special_ids = frozenset()

        def __init__(self):
            pass

        def decode(self, ids):
            return "".join(f" {'abcdef'[token]}" for token in ids).removeprefix(" ")

    unfolding = Detokenizer(Words().decode, before=[0, 1])
    assert [unfolding.add([2]), unfolding.add([3, 4])] == [" c", " d e"]
    unfolding = Detokenizer(Words().decode)
    assert [unfolding.add([2]), unfolding.add([3, 4])] == ["c", " d e"]


@pytest.mark.parametrize(
    ("stops", "expected", "met"),
    [
        ((), "one two three", False),
        (("two",), "one ", True),
        (("e t",), "on", True),
        (("three!", "x"), "one two three", False),
        (("three", "two th"), "one ", True),
        (("one",), "", True),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_a_text_ends_before_a_stop(stops, expected, met, size):
    text, cut, shown = "one two three", StopStrings(stops), ""
    for begin in range(0, len(text), size):
        shown += cut.add(text[begin : begin + size])
        assert expected.startswith(shown), "something was shown that is taken back"
    assert shown + cut.rest() == expected
    assert cut.stopped == met


def written(tokenizer, ids, sizes, stops=(), places=True, **options):
    """Text, places and number of tokens of a choice that is dealt out so."""
    output = Output(stops=stops)
    transcript = Transcript(tokenizer.decode, tokenizer.stop_ids, output, places, **options)
    text, kept = "", []
    parts = dealt(ids, sizes)
    for number, part in enumerate(parts):
        piece, given = transcript.add(
            part, [-1.0] * len(part), [[(7, -0.5)]] * len(part), number == len(parts) - 1
        )
        text, kept = text + piece, kept + given
        if transcript.stopped:
            break
    return text, kept, transcript


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("sizes", [[], [1] * 9, [4, 0, 5]])
def test_the_end_is_counted_and_not_shown(tokenizer, sizes, places):
    ids = [*tokenizer.encode("two pens"), tokenizer.eos_id]
    text, kept, transcript = written(tokenizer, ids, sizes, places=places)
    assert text == "two pens" and not transcript.stopped
    assert transcript.num_tokens == len(ids)
    assert [place.token for place in kept] == (ids[:-1] if places else [])
    if places:
        pieces = [TokenStrings(tokenizer).string_of(place.token) for place in kept]
        assert "".join(pieces) == text
        offsets = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
        assert [place.offset for place in kept] == offsets
        assert {place.top_logprobs for place in kept} == {((7, -0.5),)}


@pytest.mark.parametrize("sizes", [[], [1] * 9, [4, 0, 5]])
def test_the_end_is_among_the_tokens_where_each_is_to_be_told(tokenizer, sizes):
    ids = [*tokenizer.encode("two pens"), tokenizer.eos_id]
    text, kept, _ = written(tokenizer, ids, sizes, keeps_all=True)
    assert text == "two pens"
    assert [place.token for place in kept] == ids and kept[-1].offset == len(text)
    assert written(tokenizer, ids, sizes, places=False, keeps_all=True)[1] == []


@pytest.mark.parametrize("sizes", [[], [1] * 30, [4, 0, 9]])
def test_tokens_after_a_stop_are_neither_shown_nor_counted(tokenizer, sizes):
    ids = tokenizer.encode("pens and 3 eggs, whole")
    text, kept, transcript = written(tokenizer, ids, sizes, stops=("gg",))
    assert text == "pens and 3 e" and transcript.stopped
    shown = tokenizer.decode([place.token for place in kept])
    assert shown.startswith(text)
    assert not tokenizer.decode([place.token for place in kept[:-1]]).startswith(text)
    # The token that completed the stop is the last.
    counted = tokenizer.decode(ids[: transcript.num_tokens])
    assert "gg" in counted and "gg" not in tokenizer.decode(ids[: transcript.num_tokens - 1])


def test_tokens_are_written_as_text_or_as_the_bytes_that_they_are(tokenizer):
    pieces, ids = TokenStrings(tokenizer), tokenizer.encode("\u20ac")
    assert [pieces.string_of(i) for i in ids] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert b"".join(map(pieces.bytes_of, ids)).decode() == "\u20ac"
    assert pieces.string_of(tokenizer.eos_id) == "<|im_end|>"
    blank = tokenizer.encode(" ")[0]
    assert (pieces.string_of(blank), pieces.bytes_of(blank)) == (" ", b" ")


def test_a_character_model_has_no_bytes():
    tokenizer = Tokenizer.train_characters("abc ")
    pieces, (token,) = TokenStrings(tokenizer), tokenizer.encode(" ")
    assert tokenizer.bytes_of(token) is None
    assert (pieces.string_of(token), pieces.bytes_of(token)) == (" ", b" ")
