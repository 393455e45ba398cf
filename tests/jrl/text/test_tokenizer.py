"""Tokenizer: restores every text, refuses unknown characters, and saves the same file."""

import io
import os
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jrl.text.load import load_tokenizer
from jrl.text.tokenizer import Tokenizer

ALPHABET = "0123456789 =+-*/()\n\t,<>sé\u00a0\u3000\U0001f642"
TOKENIZER = Tokenizer.train_characters(ALPHABET)

TEXT = "one fish two fish red fish blue fish\nthree black cats and two white dogs\n" * 20


def trained(path: Path, **options) -> Path:
    """A `.model` file as a user might bring one."""
    output = io.BytesIO()
    options = {"hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=output, **options
    )
    path.write_bytes(output.getvalue())
    return path


@given(st.text(ALPHABET))
def test_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_control_pieces_in_a_text_are_characters():
    assert TOKENIZER.eos_id not in TOKENIZER.encode("</s><s>")
    assert TOKENIZER.decode(TOKENIZER.encode("</s><s>")) == "</s><s>"


def test_ids():
    special = [TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.unk_id]
    assert special == [0, 1, 2, 3]
    assert TOKENIZER.vocab_size == len(set(ALPHABET)) + 4
    assert sorted(TOKENIZER.encode(ALPHABET)) == list(range(4, TOKENIZER.vocab_size))


def test_special_ids_decode_to_nothing_and_stop_nothing():
    first, second = TOKENIZER.encode("12")
    assert TOKENIZER.decode([1, 0, first, 2, 3, second, 2]) == "12"


@pytest.mark.parametrize("identity", [-1, TOKENIZER.vocab_size])
def test_ids_outside_of_the_vocabulary(identity):
    with pytest.raises(ValueError, match=rf"ids has {identity}, outside of the vocabulary of"):
        TOKENIZER.decode([4, identity])


@pytest.mark.parametrize(
    ("text", "named"),
    [("12é34\u00e8", "U\\+00E8"), ("1_2", "'_'"), ("a", "'a'"), ("1\u25812", "U\\+2581")],
)
def test_unknown_characters_are_named(text, named):
    with pytest.raises(ValueError, match=rf"text has the character .*{named}.*: train it on"):
        TOKENIZER.encode(text)


@pytest.mark.parametrize(
    "alphabet", [" ", " \n", "\t\n", "\r\na", "".join(map(chr, range(0x4E00, 0x4E00 + 3001)))]
)
def test_unusual_alphabets(alphabet):
    tokenizer = Tokenizer.train_characters(alphabet)
    text = alphabet + alphabet[::-1] + alphabet
    assert tokenizer.vocab_size == len(alphabet) + 4
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("alphabet", ["", "\n", "\r\n"])
def test_nothing_to_train_on(alphabet):
    with pytest.raises(ValueError, match="nothing to train on: give every character"):
        Tokenizer.train_characters(alphabet)


@pytest.mark.parametrize("character", ["\0", "\x1f", "\u2581", "\u2585", "\ud800"])
def test_characters_that_would_not_survive(character):
    with pytest.raises(ValueError, match=rf"\(U\+{ord(character):04X}\), which SentencePiece"):
        Tokenizer.train_characters("ab" + character)


def test_same_characters_same_bytes(tmp_path):
    Tokenizer.train_characters("cab 1").save(tmp_path / "one.model")
    Tokenizer.train_characters("1 bacabac").save(tmp_path / "two.model")
    assert (tmp_path / "one.model").read_bytes() == (tmp_path / "two.model").read_bytes()


def test_training_is_quiet(capfd):
    Tokenizer.train_characters("0123456789=")
    assert capfd.readouterr() == ("", "")


def test_save_and_load(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"an older file")
    TOKENIZER.save(path)
    again = load_tokenizer(path)
    assert again.encode("12 + 3\n") == TOKENIZER.encode("12 + 3\n")
    assert os.listdir(tmp_path) == ["tokenizer.model"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"an older file")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        TOKENIZER.save(path)
    assert os.listdir(tmp_path) == ["tokenizer.model"]
    assert path.read_bytes() == b"an older file"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_users_model(tmp_path, model_type):
    path = trained(tmp_path / "user.model", model_type=model_type, vocab_size=41, pad_id=3)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("two fish and three cats")
    assert len(ids) < len("two fish and three cats")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "two fish and three cats"
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="'q'"):
        tokenizer.encode("two quick fish")


def test_a_model_without_padding_pads_with_its_unknown(tmp_path):
    tokenizer = load_tokenizer(trained(tmp_path / "user.model", vocab_size=41, bos_id=-1))
    assert tokenizer.pad_id == tokenizer.unk_id
    assert (tokenizer.bos_id, tokenizer.prefix) == (None, [])
    assert tokenizer.decode(
        [tokenizer.pad_id, *tokenizer.encode("two fish"), tokenizer.pad_id]
    ) == ("two fish")


def test_a_model_without_an_end(tmp_path):
    path = trained(tmp_path / "user.model", vocab_size=41, eos_id=-1)
    with pytest.raises(ValueError, match=r"user\.model: model has no end-of-sequence id"):
        load_tokenizer(path)


def test_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.model: cannot be read \(No such file"):
        load_tokenizer(tmp_path / "absent.model")
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.model: model of 8 bytes is not a SentencePiece"):
        load_tokenizer(tmp_path / "text.model")
