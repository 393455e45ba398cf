"""Text to token ids and back as a public checkpoint does it: `tokenizer.json`, or SentencePiece."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jrl.tokenizer import Tokenizer, write_whole


class JsonTokenizer(Tokenizer):
    """Maps text to token ids with the pipeline of a `tokenizer.json`.

    Attributes as for `Tokenizer`; `vocab_size` is that of the network, which may have more ids than
    the pipeline has tokens, and `unk_id` is -1 where nothing is unknown.
    """

    def __init__(self, content: Mapping[str, Any]):
        """Makes the pipeline.

        Args:
          content: "pipeline", what tokenizer.json holds; "vocab_size"; and the "eos_token",
            "bos_token", "pad_token" and "unk_token", of which only the first must be there. Without
            a beginning of sequence the end takes its place, without padding the unknown or the end.

        Raises:
          ValueError: when a special token is not in the vocabulary, there is no end of sequence, or
            the network has fewer ids than the pipeline.
        """
        self._content = dict(content)
        self._pipeline = tokenizers.Tokenizer.from_str(json.dumps(content["pipeline"]))
        self.vocab_size = content["vocab_size"]
        size = max(self._pipeline.get_vocab().values()) + 1
        if size > self.vocab_size:
            raise ValueError(
                f"tokenizer.json has ids up to {size - 1} and the network {self.vocab_size} ids: "
                "they are not of one checkpoint."
            )
        eos = self._id("eos_token")
        if eos is None:
            raise ValueError(
                "eos_token is not set, and responses could not end: name it in "
                "tokenizer_config.json."
            )
        bos, pad, unk = (self._id(name) for name in ("bos_token", "pad_token", "unk_token"))
        self.eos_id = eos
        self.unk_id = -1 if unk is None else unk
        self.bos_id = eos if bos is None else bos
        self.pad_id = pad if pad is not None else eos if unk is None else unk
        self._special = {self.pad_id, self.bos_id, self.eos_id, self.unk_id}

    def encode(self, text: str) -> list[int]:
        ids = self._pipeline.encode(text, add_special_tokens=False).ids
        if self.unk_id in ids:
            raise ValueError(
                f"text {text!r} has a part that is not among the tokens of the checkpoint's "
                "tokenizer: leave it out of the data."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"ids has {token}, outside of the vocabulary of {self.vocab_size}: "
                    "decode with the tokenizer that the model was trained with"
                )
        kept = [token for token in ids if token not in self._special]
        return self._pipeline.decode(kept, skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Writes one JSON file that `Tokenizer.from_file` reads."""
        write_whole(Path(path), json.dumps(self._content).encode())

    def _id(self, name: str) -> int | None:
        token = self._content.get(name)
        if token is None:
            return None
        number = self._pipeline.token_to_id(token)
        if number is None:
            raise ValueError(f"{name}={token!r} is not in the vocabulary of tokenizer.json.")
        return number


def checkpoint_tokenizer(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint: its `tokenizer.json`, otherwise its `tokenizer.model`.

    Special tokens are those that tokenizer_config.json names, an end of sequence that it does not
    name the one of config.json.

    Args:
      vocab_size: ids of the network.

    Raises:
      ValueError: when there is neither file, or it does not go with the network.
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        return JsonTokenizer(_content(directory, vocab_size))
    if not (directory / "tokenizer.model").exists():
        raise ValueError(
            f"{directory} has neither tokenizer.json nor tokenizer.model: copy the one of the "
            "checkpoint there."
        )
    tokenizer = Tokenizer.from_file(directory / "tokenizer.model")
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{directory}/tokenizer.model has {tokenizer.vocab_size} ids and the network "
            f"{vocab_size}: give the checkpoint's tokenizer.json, which may have fewer."
        )
    return tokenizer


def _content(directory: Path, vocab_size: int) -> dict[str, Any]:
    pipeline = _read(directory / "tokenizer.json")
    config = directory / "tokenizer_config.json"
    stated = _read(config) if config.exists() else {}
    names = ("eos_token", "bos_token", "pad_token", "unk_token")
    tokens = {name: _text(stated.get(name)) for name in names}
    if tokens["eos_token"] is None:
        tokens["eos_token"] = _end(directory, pipeline)
    return {"pipeline": pipeline, "vocab_size": vocab_size, **tokens}


def _text(token: Any) -> str | None:
    """A special token is written as its text, or as a record that has it."""
    return token["content"] if isinstance(token, Mapping) else token


def _end(directory: Path, pipeline: Mapping[str, Any]) -> str | None:
    number = _read(directory / "config.json").get("eos_token_id")
    number = number[0] if isinstance(number, list) else number
    if number is None:
        return None
    return tokenizers.Tokenizer.from_str(json.dumps(pipeline)).id_to_token(number)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
