"""SentencePiece tokenizer: text to token ids and back.

The built-in tasks train a character model of their characters, in milliseconds; a custom `.model`
file (character, BPE or unigram) is loaded as it is. Beginning and end of sequence are not added
here, but by the code that assembles a batch.
"""

import base64
import io
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
import sentencepiece

from jrl.runs import records
from jrl.text.located import TokenSpans, special_pattern

# Ids of a character model; a custom file has its own.
PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3

# SentencePiece writes a space as this character, so decoding would change it to a space.
SPACE_PIECE = "\u2581"

# Characters that do not survive encoding and decoding: the space as above, the mark of an unknown,
# the separator of training texts, the end of a C string. (Lone surrogates are not characters.)
UNUSABLE_CHARACTERS = SPACE_PIECE + "\u2585\x1f\0"


@dataclass(frozen=True)
class Usage:
    """Settings of a tokenizer that are not in its vocabulary.

    Attributes:
      stop_ids: ids that end a completion besides the end of sequence.
      begins: whether a prompt starts with the beginning of sequence, if there is one.
      chat_template: Jinja source that makes one text from a conversation; None is no template.
      chat_date: the current date for the template, as "2024-07-26".
      turn_end: the id with which the template ends the assistant's turn, which ends a completion
        too (`jrl.text.chat`); None if it is unknown, or not a token.
      template_begins: whether the beginning of sequence also precedes the template's text, if the
        template does not write it.
    """

    stop_ids: tuple[int, ...] = ()
    begins: bool = True
    chat_template: str | None = None
    chat_date: str | None = None
    turn_end: int | None = None
    template_begins: bool = False


class Tokenizer:
    """Maps text to token ids with a SentencePiece model.

    Attributes:
      vocab_size: number of ids, with special tokens.
      pad_id: padding.
      bos_id: beginning of sequence; None if there is none.
      eos_id: end of sequence.
      unk_id: unknown token; `encode` never returns it.
      usage: settings that are not part of the vocabulary.
    """

    def __init__(self, model: bytes, usage: Usage | None = None):
        """Loads a serialised SentencePiece model, the bytes of a `.model` file.

        A model that has no padding id pads with its unknown id, which never occurs in a text, as
        `encode` rejects unknown characters. If there is no beginning of sequence, nothing precedes
        a prompt.

        Args:
          usage: settings; None is a plain model, which ends completions by its end of sequence
            only.

        Raises:
          ValueError: the bytes are not a SentencePiece model, or it has no end of sequence.
        """
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(
                f"model of {len(model)} bytes is not a SentencePiece model: "
                "give the .model file that spm_train wrote"
            ) from error
        if processor.eos_id() < 0:
            raise ValueError(
                "model has no end-of-sequence id, and responses could not end: "
                "train it with an eos_id of 0 or more"
            )
        self._model = model
        self._processor = processor
        self.vocab_size = processor.vocab_size()
        self.unk_id = processor.unk_id()
        self.eos_id = processor.eos_id()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else self.unk_id
        self.usage = check_usage(Usage() if usage is None else usage, self.vocab_size)

    @property
    def prefix(self) -> list[int]:
        """Tokens before a prompt: the beginning of sequence, or nothing."""
        return [self.bos_id] if self.bos_id is not None and self.usage.begins else []

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Distinct ids that end a completion, the end of sequence first."""
        return tuple(dict.fromkeys((self.eos_id, *self.usage.stop_ids, self.turn_end_id)))

    @property
    def turn_end_id(self) -> int:
        """Id that ends the assistant's turn: the template's token, or the end of sequence."""
        return self.eos_id if self.usage.turn_end is None else self.usage.turn_end

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of special tokens by their spelling; they are not text."""
        pieces = range(self.vocab_size)
        control = [i for i in pieces if self._processor.IsControl(i) or i == self.unk_id]
        return {self._processor.IdToPiece(i): i for i in control}

    @cached_property
    def spelled_tokens(self) -> Mapping[str, int]:
        """Ids of tokens that a template writes by spelling them: special tokens, and tokens added
        to the vocabulary."""
        return self.special_tokens

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` omits."""
        named_ids = {self.pad_id, self.bos_id, self.unk_id, *self.stop_ids} - {None}
        return frozenset({*named_ids, *self.special_tokens.values(), *self.unused_ids})

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Ids that no token has, in a vocabulary that is padded to the network's."""
        return frozenset()

    @property
    def token_ids(self) -> Mapping[str, int]:
        """Ids of all tokens by their spelling in the vocabulary."""
        return {self._processor.IdToPiece(i): i for i in range(self.vocab_size)}

    @property
    def named_tokens(self) -> dict[str, str]:
        """Special tokens by their names in chat templates, for example "bos_token"."""
        ids = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id, "unk": self.unk_id}
        text_by_id = {identity: text for text, identity in self.special_tokens.items()}
        return {f"{name}_token": text_by_id[i] for name, i in ids.items() if i in text_by_id}

    @classmethod
    def train_characters(cls, characters: str) -> "Tokenizer":
        """Trains a model in which each character is one token and nothing is normalised.

        Decoding an encoded text restores it exactly, with blanks and line ends. Ids 0 to 3 are
        padding, beginning, end and unknown.

        Args:
          characters: all characters of the texts; order and repetitions have no effect.

        Raises:
          ValueError: there is no character, only line ends, or a character that SentencePiece does
            not restore.
        """
        alphabet = sorted(set(characters))
        if not set(alphabet) - {"\n", "\r"}:
            raise ValueError(
                f"characters={characters!r} has nothing to train on: "
                "give every character that the texts can contain"
            )
        for character in alphabet:
            if character in UNUSABLE_CHARACTERS or "\ud800" <= character <= "\udfff":
                raise _unusable_character(character)
        sentence = "".join(alphabet + alphabet[::-1])  # twice, as a final line end would be lost
        output = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([sentence]),
            max_sentence_length=64 + 8 * len(alphabet),  # bytes; longer ones are skipped
            model_writer=output,
            model_type="char",
            vocab_size=len(alphabet) + 4,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            character_coverage=1.0,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            minloglevel=2,
        )
        tokenizer = cls(output.getvalue())
        for character in alphabet:
            ids = tokenizer.encode(character)
            if len(ids) != 1 or tokenizer.decode(ids) != character:
                raise _unusable_character(character)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Encodes a text, without beginning or end of sequence.

        Raises:
          ValueError: the model has no token for a character of `text`.
        """
        ids = self._processor.encode(text, out_type=int)
        unknown = SPACE_PIECE if SPACE_PIECE in text else None
        if unknown is None and self.unk_id in ids:
            # An unknown piece is spelled as its text.
            unknown = self._processor.encode(text, out_type=str)[ids.index(self.unk_id)][0]
        if unknown is not None:
            raise ValueError(
                f"text has the character {unknown!r} (U+{ord(unknown):04X}), which is not "
                f"among the {self.vocab_size} pieces of the tokenizer: train it on "
                "characters that include this one, or give a .model trained with byte_fallback"
            )
        return ids

    def encode_special(self, text: str, escape: str | None = None) -> list[int]:
        """As `encode`, but special tokens spelled in the text become their ids.

        Args:
          escape: a character that is not part of the text; special tokens with escapes between
            their characters are text.
        """
        return self.encode_special_spans(text, escape).ids

    def encode_special_spans(self, text: str, escape: str | None = None) -> TokenSpans:
        """As `encode_special`, with the spans of the tokens in the text without escapes."""
        spans, offset = list[tuple[int, int, int]](), 0
        for segment in re.split(f"({special_pattern(self.special_tokens)})", text):
            if segment in self.special_tokens:
                spans.append((self.special_tokens[segment], offset, offset + len(segment)))
            else:
                segment = segment if escape is None else segment.replace(escape, "")
                spans += [(i, offset + a, offset + b) for i, a, b in self._spans(segment)]
            offset += len(segment)
        return TokenSpans.from_spans(spans)

    def encode_spans(self, text: str) -> TokenSpans:
        """As `encode`, with the spans of the tokens in the text."""
        return TokenSpans.from_spans(self._spans(text))

    def with_prefix(self, ids: list[int]) -> list[int]:
        """Ids with the tokens before a prompt, unless they start with them."""
        return ids if ids[: len(self.prefix)] == self.prefix else [*self.prefix, *ids]

    def with_template_prefix(self, ids: list[int]) -> list[int]:
        """As `with_prefix`, for ids of a chat template's text."""
        return self.with_prefix(ids) if self.usage.template_begins else ids

    def encode_continuation(self, before: str, text: str) -> list[int]:
        """Ids of a text that follows another text, whose ids precede them.

        Raises:
          ValueError: as for `encode`.
        """
        first, both = self.encode(before), self.encode(before + text)
        # A tokenizer may add a blank at the start of a text, which a continuation does not have.
        return both[len(first) :] if both[: len(first)] == first else self.encode(text)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Decodes ids to text; special ids are omitted, and decoding continues after them.

        Raises:
          ValueError: an id is outside of the vocabulary, [0, vocab_size).
        """
        return self._text([i for i in self._check_ids(ids) if i not in self.special_ids])

    def decode_special(
        self, ids: Iterable[SupportsInt], unknown: str = "", names: Container[str] | None = None
    ) -> str:
        """As `decode`, with special tokens written out.

        Args:
          unknown: replaces a special token that is not written out, and an id that has no token.
          names: special tokens that are written out; None is all.
        """
        text_by_id = {
            identity: text
            for text, identity in self.special_tokens.items()
            if names is None or text in names
        }
        segments: list[str] = []
        for special, run in groupby(self._check_ids(ids), self.special_ids.__contains__):
            if special:
                segments += [text_by_id.get(token, unknown) for token in run]
            else:
                segments.append(self._text(list(run)))
        return "".join(segments)

    def bytes_of(self, token: int) -> bytes | None:
        """Bytes of a token that is made of bytes, possibly part of a character; None for any
        other."""
        piece = self._processor.IdToPiece(token)
        return bytes.fromhex(piece[3:5]) if self._processor.IsByte(token) else None

    def save(self, path: str | Path) -> None:
        """Writes the file that `load_tokenizer` reads, a plain model as its `.model` file, into an
        existing folder; the replacement is atomic."""
        content = self._model
        if self.usage != Usage():
            model = base64.b64encode(self._model).decode()
            content = json.dumps({"sentencepiece": model, **asdict(self.usage)}).encode()
        records.replace(Path(path), content)

    def vocabulary(self) -> dict[str, bytes]:
        """The vocabulary file of a public checkpoint, by its name."""
        return {"tokenizer.model": self._model}

    def with_usage(self, usage: Usage) -> "Tokenizer":
        """The same tokenizer with other settings."""
        return Tokenizer(self._model, usage)

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        """As `encode`, each id with the position of its first character and its end."""
        self.encode(text)  # rejects unknown characters
        return piece_spans(self._processor.encode(text, out_type="serialized_proto"), text)

    def _text(self, ids: list[int]) -> str:
        """The text of ids without special ones."""
        return self._processor.decode(ids)

    def _check_ids(self, ids: Iterable[SupportsInt]) -> list[int]:
        """Validates ids and converts them to int."""
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"ids has {token}, outside of the vocabulary of {self.vocab_size}: "
                    "decode with the tokenizer that the model was trained with"
                )
        return ids


def usage_from(content: Mapping[str, Any]) -> Usage:
    """The `Usage` in a saved tokenizer."""
    settings = {field.name: content[field.name] for field in fields(Usage) if field.name in content}
    if isinstance(settings.get("stop_ids"), list):
        settings["stop_ids"] = tuple(settings["stop_ids"])
    return Usage(**settings)


def check_usage(usage: Usage, vocab_size: int) -> Usage:
    for token in (*usage.stop_ids, *(() if usage.turn_end is None else (usage.turn_end,))):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"the stop ids (eos_token_id) have {token}, which is not an id of a vocabulary of "
                f"{vocab_size}: take the config.json and generation_config.json of the checkpoint."
            )
    return usage


def _unusable_character(character: str) -> ValueError:
    return ValueError(
        f"characters has {character!r} (U+{ord(character):04X}), which SentencePiece uses itself "
        "or cannot keep: replace it in the data"
    )


PIECES, ID, BEGIN, END = 2, 2, 4, 5
"""Field numbers of a text and of a piece in SentencePiece's message."""
VARINT, BYTES, FLOAT = 0, 2, 5
"""Wire types of Protobuf values."""


def piece_spans(message: bytes, text: str) -> list[tuple[int, int, int]]:
    """Id, first character and end of each piece of a text, from the message that SentencePiece
    serialises of it (`sentencepiece.proto`).

    A text has pieces; a piece has its id, and its start and end in bytes. The library's objects for
    it were renamed between versions and need Protobuf; the serialised message is stable.
    """
    sizes = [len(character.encode()) for character in text]
    # Character of each byte, and after the last byte the number of characters.
    characters = [*np.repeat(np.arange(len(text)), sizes).tolist(), len(text)]
    spans = []
    for field, value in _message_fields(message):
        if field == PIECES and isinstance(value, bytes):
            piece = {name: x for name, x in _message_fields(value) if isinstance(x, int)}
            begin, end = piece.get(BEGIN, 0), piece.get(END, 0)
            spans.append((piece.get(ID, 0), characters[begin], characters[end]))
    return spans


def _message_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        field, kind = key >> 3, key & 7
        if kind == VARINT:
            value, offset = _varint(message, offset)
        elif kind == BYTES:
            size, offset = _varint(message, offset)
            value, offset = message[offset : offset + size], offset + size
        else:
            assert kind == FLOAT, f"kind {kind} is not a field type of a SentencePieceText"
            value, offset = message[offset : offset + 4], offset + 4
        yield field, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """A variable-length integer, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
