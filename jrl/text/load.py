"""Loading of a tokenizer: SentencePiece, ``tokenizer.json``, or the file that a run saved."""

import base64
import binascii
import os
from importlib.util import find_spec
from pathlib import Path

from jrl.text.tokenizer import Tokenizer, usage_from
from moe.huggingface.json_file import parse_json


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Loads a `.model` file, a `tokenizer.json`, or a file written by `Tokenizer.save`.

    A `tokenizer.json` does not name the token that ends a sequence; it is read from the files of a
    checkpoint beside it, as in `jrl.text.json_tokenizer.checkpoint_tokenizer`.

    Args:
      vocab_size: number of ids of the network, which may exceed the tokens of a tokenizer.json.

    Raises:
      ValueError: there is no such file, or it is not a usable tokenizer.
    """
    path = Path(os.path.expanduser(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}): "
            "give the path of a SentencePiece .model file or of a tokenizer.json"
        ) from error
    try:
        # A SentencePiece model never begins with a brace.
        if content.startswith(b"{"):
            return _from_json(path, content, vocab_size)
        return Tokenizer(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_json(path: Path, content: bytes, vocab_size: int | None) -> Tokenizer:
    """The tokenizer of a JSON file: one that a run saved, or a tokenizer.json."""
    try:
        record = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}): copy the file again") from error
    if "sentencepiece" in record:
        try:
            model = base64.b64decode(record["sentencepiece"], validate=True)
        except (TypeError, binascii.Error) as error:
            raise ValueError(f"its model is corrupted ({error}): copy the file again") from error
        return Tokenizer(model, usage_from(record))
    if find_spec("tokenizers") is None:
        raise ValueError(
            'needs tokenizers, which is not installed: run pip install -e ".[hf]" in the clone'
        )
    from jrl.text import json_tokenizer  # needs an extra

    if "pipeline" in record:
        try:
            return json_tokenizer.JsonTokenizer(record)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"is not a tokenizer that a run saved ({error!r}): copy the file again"
            ) from error
    return json_tokenizer.tokenizer_of(path, record, vocab_size)
