from jrl.text.prompt_format import token_texts
from jrl.text.tokenizer import Tokenizer


class Bytes(Tokenizer):
    """Ids are bytes; 256 is a special token."""

    def __init__(self):
        pass

    def decode_special(self, ids, unknown=""):
        runs = "".join(chr(i) for i in ids).split(chr(256))
        return "<end>".join(run.encode("latin-1").decode("utf-8", "replace") for run in runs)


def test_a_character_belongs_to_the_token_that_completes_it():
    ids = [*"aé".encode(), *"😀".encode(), 256, ord("b")]
    assert token_texts(Bytes(), ids) == ["a", "", "é", "", "", "", "😀", "<end>", "b"]
    assert token_texts(Bytes(), list("é".encode()[:1])) == ["\ufffd"]


def test_pieces_are_the_whole_text():
    tokenizer = Tokenizer.train_characters("ab 1")
    ids = [*tokenizer.encode("a b1"), *tokenizer.stop_ids, *tokenizer.encode(" a")]
    found = token_texts(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode_special(ids)
    assert token_texts(tokenizer, []) == []
