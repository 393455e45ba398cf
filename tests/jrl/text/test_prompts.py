"""Prompts as arrays: padding, ends, and special tokens in a completion."""

import numpy as np
import pytest
import tokenizers
from chat_checkpoint import START, VOCAB_SIZE, write_tokenizer
from small_runs import small_setup

from jrl.tasks import Example
from jrl.tasks.answers import extract
from jrl.tasks.answers.extraction import UNREADABLE
from jrl.text.conversation import reference_rows
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.prompt_format import encode_prompt, opened_reasoning, text_of, token_texts
from jrl.text.tokenizer import Tokenizer


def test_prompts_are_padded_on_the_left():
    setup = small_setup()
    examples = [Example(text, "") for text in ("2=", "0120=")]
    tokens, valid, _ = (x[:, :6] for x in reference_rows(setup.format, examples, 6, 1))
    begin = [setup.tokenizer.bos_id]
    pad = setup.tokenizer.pad_id
    ids = setup.tokenizer.encode
    assert tokens.tolist() == [[pad] * 3 + begin + ids("2="), begin + ids("0120=")]
    assert valid.tolist() == [[False] * 3 + [True] * 3, [True] * 6]
    with pytest.raises(
        ValueError, match=r"'01201=' has 7 tokens .*prompt_length=6: raise --prompt"
    ):
        encode_prompt(setup.format, Example("01201=", ""), setup.prompt_length)


def test_answers_end():
    setup = small_setup()
    lengths = setup.prompt_length, setup.response_length
    examples = [Example("", "2="), Example("", "0120")]
    tokens, valid, mask = (
        x[:, lengths[0] :] for x in reference_rows(setup.format, examples, *lengths)
    )
    end = [setup.tokenizer.eos_id]
    pad = setup.tokenizer.pad_id
    ids = setup.tokenizer.encode
    assert tokens.tolist() == [ids("2=") + end + [pad] * 2, ids("0120") + end]
    assert valid.tolist() == mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    with pytest.raises(ValueError, match=r"'01201' has 6 tokens .*response_length=5: raise --resp"):
        reference_rows(setup.format, [Example("", "01201")], *lengths)


def test_special_tokens_inside_a_completion_show():
    tokenizer = small_setup().tokenizer
    one, two = tokenizer.encode("12")
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id]
    for token in special:
        assert text_of(tokenizer, np.array([one, token, two])) == f"1{UNREADABLE}2"
        assert text_of(tokenizer, np.array([one, two, token])) == f"12{UNREADABLE}"
    end = tokenizer.eos_id
    assert text_of(tokenizer, np.array([one, two, end])) == "12"
    assert text_of(tokenizer, np.array([one, end, end])) == f"1{UNREADABLE}"
    assert text_of(tokenizer, np.array([end])) == ""
    assert text_of(tokenizer, np.array([], int)) == ""


def test_marks_of_reasoning_are_written_out(tmp_path):
    """A verifier needs the end of reasoning, even if the mark is a special token."""
    folder = write_tokenizer(tmp_path / "qwen")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["[THINK]", "[/THINK]"])
    made.save(str(folder / "tokenizer.json"))
    tokenizer = checkpoint_tokenizer(folder, VOCAB_SIZE)
    begin, end = (tokenizer.special_tokens[name] for name in ("[THINK]", "[/THINK]"))
    two, seven, turn = (tokenizer.encode(text) for text in ("2", "7", "user"))
    ids = [begin, *two, end, *seven, tokenizer.special_tokens[START], tokenizer.eos_id]
    text = text_of(tokenizer, np.array(ids))
    assert text == f"[THINK]2[/THINK]7{UNREADABLE}"
    found = extract(text)
    assert found is not None
    assert found.text == "7"
    # A template may open it in the prompt, and the policy goes on.
    assert opened_reasoning(tokenizer, [*turn, begin]) == "[THINK]"
    assert opened_reasoning(tokenizer, [begin, *turn, end]) == ""
    assert opened_reasoning(tokenizer, [begin, *turn]) == ""
    assert opened_reasoning(tokenizer, []) == ""


class Bytes(Tokenizer):
    """Ids are bytes; 256 is a special token."""

    def __init__(self):
        pass

    def decode_special(self, ids, unknown=""):
        runs = "".join(chr(i) for i in ids).split(chr(256))
        return "<end>".join(run.encode("latin-1").decode("utf-8", "replace") for run in runs)


def test_token_texts_gives_character_to_its_last_token():
    ids = [*"aé".encode(), *"😀".encode(), 256, ord("b")]
    assert token_texts(Bytes(), ids) == ["a", "", "é", "", "", "", "😀", "<end>", "b"]
    assert token_texts(Bytes(), list("é".encode()[:1])) == ["\ufffd"]


def test_token_texts_concatenate_to_text():
    tokenizer = Tokenizer.train_characters("ab 1")
    ids = [*tokenizer.encode("a b1"), *tokenizer.stop_ids, *tokenizer.encode(" a")]
    found = token_texts(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode_special(ids)
    assert token_texts(tokenizer, []) == []
