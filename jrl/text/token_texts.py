"""Text of each token."""

from collections.abc import Sequence

from jrl.text.tokenizer import Tokenizer


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token, special tokens written out; together they are the whole text.

    A token that ends within a character has none: the one that completes it has the character.
    """
    texts: list[str] = []
    # A token is read with the one before it: a space that a tokenizer drops in front of a text
    # belongs to the token wherever else that stands.
    begin = end_of_last = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode_special(ids[begin:end_of_last])
        now = tokenizer.decode_special(ids[begin:end])
        if now.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        begin, end_of_last = end_of_last, end
    return texts
