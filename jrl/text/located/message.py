"""Offsets of SentencePiece's pieces in a text, from the message that it serialises.

The library's own objects for it have changed their names between versions; the message has not
(`sentencepiece.proto`: a text has pieces, a piece its id and the bytes of its start and end).
"""

from collections.abc import Iterator

import numpy as np

PIECES, ID, BEGIN, END = 2, 2, 4, 5
"""Numbers of the fields: of the text, and of a piece."""
VARINT, BYTES, FLOAT = 0, 2, 5
"""Kinds of values on the wire."""


def piece_spans(message: bytes, text: str) -> list[tuple[int, int, int]]:
    """Id, first character and the one behind the last of each piece.

    Args:
      message: of the text.
    """
    sizes = [len(character.encode()) for character in text]
    # The character in which each byte lies, and the number of them behind the last.
    characters = [*np.repeat(np.arange(len(text)), sizes).tolist(), len(text)]
    spans = []
    for number, value in _fields(message):
        if number == PIECES and isinstance(value, bytes):
            piece = {field: each for field, each in _fields(value) if isinstance(each, int)}
            begin, end = piece.get(BEGIN, 0), piece.get(END, 0)
            spans.append((piece.get(ID, 0), characters[begin], characters[end]))
    return spans


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, offset = _varint(message, offset)
        elif kind == BYTES:
            size, offset = _varint(message, offset)
            value, offset = message[offset : offset + size], offset + size
        else:
            assert kind == FLOAT, f"kind {kind} is not a field type of a SentencePieceText"
            value, offset = message[offset : offset + 4], offset + 4
        yield number, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """A number, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
