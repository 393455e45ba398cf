"""Tokenizer of a public checkpoint: `tokenizer.json`, or SentencePiece."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jrl.runs import records
from jrl.tasks.data.fields import check_characters
from jrl.text.chat import today, with_turn_end
from jrl.text.checkpoint_files import CONFIG, chat_template_in, read_object, read_optional
from jrl.text.located import SPAN_BEGIN, SPAN_END, TokenSpans, check_no_delimiters, special_pattern
from jrl.text.tokenizer import Tokenizer, Usage, check_usage, usage_from

BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
"""Pattern of a token for a single byte, in vocabularies with byte fallback."""
ADDED = "added_tokens.json"
TOKENS = ("eos_token", "bos_token", "pad_token", "unk_token")


class JsonTokenizer(Tokenizer):
    """Maps text to token ids with the pipeline of a `tokenizer.json`.

    Attributes are as in `Tokenizer`; `vocab_size` is the network's, which may have more ids than
    the pipeline has tokens, and `unk_id` is -1 if no token is unknown. Special tokens spelled in a
    text become their ids in `encode` too, as in the pipeline.
    """

    def __init__(self, content: Mapping[str, Any], usage: Usage | None = None):
        """Makes the pipeline.

        Args:
          content: "pipeline", the content of tokenizer.json; "vocab_size"; the required
            "eos_token"; the optional "bos_token", "pad_token" and "unk_token"; and the
            fields of a `Usage`. If there is no beginning of sequence, nothing precedes a prompt; if
            there is no padding, the unknown token or the end takes its place.
          usage: replaces the one in `content`.

        Raises:
          ValueError: if a special token is not in the vocabulary, there is no end of sequence, or
            the network has fewer ids than the pipeline.
        """
        self.usage = usage_from(content) if usage is None else usage
        self._content = {**content, **asdict(self.usage)}
        # The post-processor's tokens are not part of the text; it also moves the offsets of blanks.
        self._pipeline = _load_pipeline({**content["pipeline"], "post_processor": None})
        self.vocab_size = content["vocab_size"]
        size = max(self._pipeline.get_vocab().values(), default=-1) + 1
        if size > self.vocab_size:
            raise ValueError(
                f"tokenizer.json has ids up to {size - 1} and the network {self.vocab_size} ids: "
                "they are not of one checkpoint."
            )
        check_usage(self.usage, self.vocab_size)
        added = {each.content for each in self._pipeline.get_added_tokens_decoder().values()}
        for name in TOKENS[:-1]:
            # Tokens that a template spells, whether added to the vocabulary or part of it.
            if self._id(name) is not None and self._content[name] not in added:
                self._pipeline.add_special_tokens([self._content[name]])
        eos, self.bos_id, pad, unk = map(self._id, TOKENS)
        if eos is None:
            raise ValueError(
                "eos_token is not set, and responses could not end: name it in "
                "tokenizer_config.json."
            )
        self.eos_id = eos
        self.unk_id = -1 if unk is None else unk
        self.pad_id = pad if pad is not None else eos if unk is None else unk

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        added = self._pipeline.get_added_tokens_decoder()
        special = {token.content: identity for identity, token in added.items() if token.special}
        named = {self._content[name]: self._id(name) for name in TOKENS if self._content.get(name)}
        ends = {self._pipeline.id_to_token(i): i for i in self.stop_ids}
        return {text: i for text, i in (special | named | ends).items() if text and i is not None}

    @cached_property
    def spelled_tokens(self) -> Mapping[str, int]:
        added = self._pipeline.get_added_tokens_decoder()
        return {**{token.content: i for i, token in added.items()}, **self.special_tokens}

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        return frozenset(range(self.vocab_size)).difference(self.token_ids.values())

    @property
    def token_ids(self) -> Mapping[str, int]:
        return self._pipeline.get_vocab(with_added_tokens=True)

    @property
    def named_tokens(self) -> dict[str, str]:
        return {name: self._content[name] for name in TOKENS if self._content.get(name)}

    def encode(self, text: str) -> list[int]:
        return self._encoding(text).ids

    def encode_special_spans(self, text: str, escape: str | None = None) -> TokenSpans:
        if escape is None or escape not in text:
            return self.encode_spans(text)
        return self._escaped_tokenizer.encode_spans(text, escape)

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        encoding = self._encoding(text)
        return [(token, *span) for token, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encoding(self, text: str) -> tokenizers.Encoding:
        check_characters(text, f"text {text[:60]!r}")
        encoding = self._pipeline.encode(text, add_special_tokens=False)
        if self.unk_id in encoding.ids:
            raise ValueError(
                f"text {text!r} has characters that the checkpoint's tokenizer cannot encode: "
                "leave it out of the data."
            )
        return encoding

    @cached_property
    def _escaped_tokenizer(self) -> "EscapedTextTokenizer":
        """Encoder of texts whose escaped special tokens are text."""
        return EscapedTextTokenizer(self._content["pipeline"], self.special_tokens)

    def bytes_of(self, token: int) -> bytes | None:
        piece = self._pipeline.id_to_token(token)
        if piece is None or token in self.special_ids:
            return None
        if BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        if _is_byte_level(self._content["pipeline"]) and set(piece) <= set(_BYTES):
            return bytes(_BYTES[character] for character in piece)
        return None

    def save(self, path: str | Path) -> None:
        """Writes a JSON file for `load_tokenizer`."""
        records.replace(Path(path), json.dumps(self._content).encode())

    def vocabulary(self) -> dict[str, bytes]:
        pipeline = json.dumps(self._content["pipeline"], ensure_ascii=False, indent=2)
        return {"tokenizer.json": pipeline.encode()}

    def with_usage(self, usage: Usage) -> "JsonTokenizer":
        tokenizer = copy(self)  # shares the pipeline, which takes a second to build
        tokenizer.usage = check_usage(usage, self.vocab_size)
        tokenizer._content = {**self._content, **asdict(usage)}
        for name in ("special_tokens", "special_ids", "spelled_tokens", "_escaped_tokenizer"):
            vars(tokenizer).pop(name, None)
        return tokenizer

    def _text(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def _id(self, name: str) -> int | None:
        token = self._content.get(name)
        if token is None:
            return None
        token_id = self._pipeline.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{name}={token!r} is not in the vocabulary of tokenizer.json.")
        return token_id


def checkpoint_tokenizer(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint: its `tokenizer.json`, otherwise its `tokenizer.model`.

    The following is read as well, if present:

    * special tokens: those named in tokenizer_config.json; an end of sequence that it does not name
      is the first `eos_token_id` of generation_config.json or of config.json;
    * tokens that end a completion: that end, every `eos_token_id`, a number or a list, of
      generation_config.json and config.json, and the token with which the chat template ends the
      assistant's turn;
    * the beginning of sequence before a prompt that no template writes: as `add_bos_token` says; if
      that is not set, it is there if the post-processor of tokenizer.json adds it or there is no
      post-processor;
    * the chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, a text
      or a list with an entry named "default", else the one in chat_template.json.

    Args:
      vocab_size: number of ids of the network.

    Raises:
      ValueError: if there is neither file, or it does not fit the network.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if path.exists():
        return tokenizer_of(path, read_object(path), vocab_size)
    path = directory / "tokenizer.model"
    if not path.exists():
        raise ValueError(
            f"{directory} has neither tokenizer.json nor tokenizer.model: copy the one of the "
            "checkpoint there."
        )
    try:
        tokenizer = Tokenizer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{directory}/tokenizer.model has {tokenizer.vocab_size} ids and the network "
            f"{vocab_size}: give the checkpoint's tokenizer.json, which may have fewer."
        )
    config = read_optional(directory / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    begins = bool(config.get("bos_token", True) if add_bos is None else add_bos)
    usage = _usage_of_checkpoint(directory, config, begins, bool(add_bos))
    return with_turn_end(tokenizer.with_usage(usage))


def tokenizer_of(
    path: Path, pipeline: Mapping[str, Any], vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of a tokenizer.json with a pipeline, with the settings of the files beside it.

    Args:
      vocab_size: number of ids of the network; None is the number of tokens.

    Raises:
      ValueError: if it is not a tokenizer.json, or no file names the end of sequence.
    """
    backend = _load_pipeline(pipeline)
    config = read_optional(path.parent / "tokenizer_config.json")
    check_tokens(path, pipeline, backend, config)
    tokens = {name: _token_text(config.get(name)) for name in TOKENS}
    add_bos = config.get("add_bos_token")
    # If no file specifies it, it begins a plain text, but not the text of a template.
    unspecified = add_bos is None and pipeline.get("post_processor") is None
    begins = bool(add_bos is None or add_bos)
    if add_bos is None and not unspecified and tokens["bos_token"] is not None:
        first = backend.encode("", add_special_tokens=True).tokens[:1]
        begins = first == [tokens["bos_token"]]
    usage = _usage_of_checkpoint(path.parent, config, begins, begins and not unspecified)
    size = max(backend.get_vocab().values(), default=-1) + 1 if vocab_size is None else vocab_size
    check_usage(usage, size)
    if tokens["eos_token"] is None and usage.stop_ids:
        tokens["eos_token"] = backend.id_to_token(usage.stop_ids[0])
    return with_turn_end(JsonTokenizer({"pipeline": pipeline, "vocab_size": size, **tokens}, usage))


def _byte_characters() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies: a printable byte is its own character,
    others are mapped to the characters from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_characters()


def _is_byte_level(pipeline: Mapping[str, Any]) -> bool:
    """True if the tokens are written in the characters of `_BYTES`, as byte-level BPE does."""
    decoder = pipeline.get("decoder") or {}
    decoders = decoder.get("decoders", [decoder])
    return any(each.get("type") == "ByteLevel" for each in decoders)


def _usage_of_checkpoint(
    directory: Path, config: Mapping[str, Any], begins: bool, template_begins: bool
) -> Usage:
    template = chat_template_in(directory, config)
    day = None if template is None else today()
    return Usage(_stop_ids(directory), begins, template, day, template_begins=template_begins)


def _stop_ids(directory: Path) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        eos = read_optional(directory / name).get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        for token in eos_ids:
            if type(token) is not int:
                raise ValueError(
                    f"{directory / name}: eos_token_id has {token!r}, not a number: take the file "
                    "of the checkpoint."
                )
        ids += eos_ids
    return tuple(dict.fromkeys(ids))


def _load_pipeline(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics past it
        raise ValueError(
            f"tokenizer.json cannot be read by tokenizers ({error}): copy the checkpoint's."
        ) from error
    # Truncation and padding that were set when the file was saved.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_text(token: Any) -> str | None:
    """Text of a special token, given as a text or as a record with "content"."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if token is not None and not isinstance(text, str):
        raise ValueError(
            f"tokenizer_config.json has the special token {token!r}, which is neither a text nor "
            'an object with a text "content": take the file of the checkpoint.'
        )
    return text


class EscapedTextTokenizer:
    """Encodes a text in which the template's special tokens are written as they are, and special
    tokens that are text are escaped (`jrl.text.located`).

    The pipeline gets another name for each special token, which replaces the token in the text; the
    spelled names of special tokens are left to the model as ordinary text. A text without escapes
    has the same tokens as before.
    """

    def __init__(self, pipeline: Mapping[str, Any], special: Mapping[str, int]):
        added = [
            {**token, "special": token["special"] or token["content"] in special}
            for token in pipeline.get("added_tokens") or ()
        ]
        changed = {**pipeline, "added_tokens": added, "post_processor": None}
        self._pipeline = _load_pipeline(changed)
        self._pipeline.encode_special_tokens = True
        self._special = special
        self._names = {text: f"{SPAN_BEGIN}{n}{SPAN_END}" for n, text in enumerate(special)}
        options = {
            token["content"]: {
                name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            for token in added
        }
        self._pipeline.add_tokens(
            [tokenizers.AddedToken(name, **options.get(x, {})) for x, name in self._names.items()]
        )
        self._special_ids = {
            self._pipeline.token_to_id(name): special[text] for text, name in self._names.items()
        }

    def encode_spans(self, text: str, escape: str) -> TokenSpans:
        """The tokens, and their offsets in the text without escapes; rejects a spelled special
        token that is a token of the model."""
        check_no_delimiters(text)
        check_characters(text, f"text {text[:60]!r}")
        parts = re.split(f"({special_pattern(self._special)})", text)
        names = [self._names.get(part) for part in parts]
        encoding, offsets, unread = self._encode(parts, names, escape)
        if unread:
            # A token with "single_word" is text inside of a word.
            names = [None if index in unread else name for index, name in enumerate(names)]
            encoding, offsets, _ = self._encode(parts, names, escape)
        spelled = set(encoding.ids) & set(self._special.values())
        if spelled:
            names = [name for name, token in self._special.items() if token in spelled]
            raise ValueError(
                f"a message spells the special token {names[0]!r}, which the tokenizer cannot "
                "write as text: leave it out"
            )
        ids = [self._special_ids.get(token, token) for token in encoding.ids]
        spans = offsets[np.array(encoding.offsets, np.int64).reshape(-1, 2)]
        return TokenSpans(ids, spans[:, 0], spans[:, 1])

    def _encode(
        self, parts: Sequence[str], names: Sequence[str | None], escape: str
    ) -> tuple[tokenizers.Encoding, np.ndarray, set[int]]:
        """The tokens of a text in parts, some of which are written by another name; the offset of
        each character in the text without escapes; and the parts whose name is not one token."""
        segments = [part.replace(escape, "") for part in parts]
        written = [name or segment for name, segment in zip(names, segments, strict=True)]
        # The first character of a name has the width of the token that it replaces.
        widths = [
            [len(segment), *[0] * (len(name) - 1)] if name else [1] * len(segment)
            for name, segment in zip(names, segments, strict=True)
        ]
        offsets = np.cumsum([0, *chain.from_iterable(widths)], dtype=np.int64)
        encoding = self._pipeline.encode("".join(written), add_special_tokens=False)
        read = [
            span
            for token, span in zip(encoding.ids, encoding.offsets, strict=True)
            if token in self._special_ids
        ]
        begins = np.cumsum([0, *map(len, written)]).tolist()
        covered = set(chain.from_iterable(range(*span) for span in read))
        unread = {i for i, name in enumerate(names) if name and begins[i] not in covered}
        return encoding, offsets, unread


def check_tokens(
    path: Path,
    pipeline: Mapping[str, Any],
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
) -> None:
    """Refuses a vocabulary in which a token has two ids, or an id two tokens.

    Args:
      path: the tokenizer.json.
      pipeline: its content.
      backend: the tokenizer that was made of it, which numbers added tokens itself.
      config: content of the tokenizer_config.json beside it.

    Raises:
      ValueError: naming the token, the ids and the file.
    """
    for token, identity in _vocabulary(pipeline):
        if backend.token_to_id(token) != identity or backend.id_to_token(identity) != token:
            other = backend.id_to_token(identity)
            second = f"id {identity} is {other!r} too" if other != token else "another id too"
            raise ValueError(f"{path}: the token {token!r} has the id {identity}, and {second}.")
    for name, stated in _added(path.parent, config):
        for token, identity in stated:
            token_id = backend.token_to_id(token)
            if token_id != identity:
                has = "does not have it" if token_id is None else f"has {token_id}"
                raise ValueError(
                    f"{path.parent / name} has the token {token!r} with the id {identity!r}, and "
                    f"{path.name} {has}: save the tokenizer again, or take the files of one "
                    "checkpoint."
                )


def _vocabulary(pipeline: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Tokens with their ids, as tokenizer.json lists them."""
    vocabulary = (pipeline.get("model") or {}).get("vocab")
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):
        yield from ((piece, identity) for identity, (piece, _) in enumerate(vocabulary))
    yield from ((token["content"], token["id"]) for token in pipeline.get("added_tokens") or ())


def _added(
    folder: Path, config: Mapping[str, Any]
) -> Iterator[tuple[str, list[tuple[str, int | str]]]]:
    """Added tokens with their ids, by the file that states them."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        stated = [
            (token["content"], int(identity) if identity.isdigit() else identity)
            for identity, token in decoder.items()
            if isinstance(token, Mapping) and isinstance(token.get("content"), str)
        ]
        yield CONFIG, stated
    yield ADDED, list(read_optional(folder / ADDED).items())
