"""Loading of a tokenizer (SentencePiece, ``tokenizer.json``, or the file that a run saved), and the
files beside the weights of a public checkpoint: tokenizer, chat template, generation settings.

A run that starts from a checkpoint keeps the small ones (`copy_checkpoint_files`). Its exports then
have the checkpoint's settings of tokens and sampling, even if the checkpoint itself was moved.
"""

import base64
import binascii
import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jrl.text.json_tokenizer import chat_template_in, read_object
from jrl.text.tokenizer import Tokenizer, usage_from

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "chat_template.json"
COPIED_FILES = (
    CONFIG,
    GENERATION,
    TEMPLATE,
    TEMPLATES,
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files of a checkpoint beside its vocabulary, each of them optional."""


def copy_checkpoint_files(checkpoint: Path, folder: Path) -> None:
    """Copies the files of a checkpoint that are in `COPIED_FILES`."""
    folder.mkdir(exist_ok=True)
    for name in COPIED_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def checkpoint_files(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    """The files by name.

    What `copy_checkpoint_files` copied stays as it is, but for two things that a run may have of
    its own: its chat template, and in generation_config.json all ids that end a completion, which
    the checkpoint may name in several files. What was not copied is made of what the tokenizer
    has.

    Args:
      tokenizer: of the run.
      folder: that of `copy_checkpoint_files`, which need not be there.

    Raises:
      ValueError: where one of the copied files is not JSON.
    """
    files = {
        name: (folder / name).read_bytes() for name in COPIED_FILES if (folder / name).is_file()
    }
    config = read_object(folder / CONFIG) if CONFIG in files else _config_of(tokenizer)
    template = tokenizer.usage.chat_template
    if template != chat_template_in(folder, config):
        files.pop(TEMPLATES, None)
        config = {name: value for name, value in config.items() if name != "chat_template"}
        if template is not None:
            files[TEMPLATE] = template.encode()
    if CONFIG not in files or config != read_object(folder / CONFIG):
        files[CONFIG] = _json(config)
    generation = read_object(folder / GENERATION) if GENERATION in files else {}
    updated = {**token_ids(tokenizer), **generation, "eos_token_id": _ends(tokenizer)}
    if updated != generation:
        files[GENERATION] = _json(updated)
    return files | tokenizer.vocabulary()


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The special ids as config.json and generation_config.json name them."""
    begins = {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
    return {**begins, "eos_token_id": _ends(tokenizer), "pad_token_id": tokenizer.pad_id}


def _ends(tokenizer: Tokenizer) -> int | list[int]:
    ends = list(tokenizer.stop_ids)
    return ends[0] if len(ends) == 1 else ends


def _config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    has_pipeline = "tokenizer.json" in tokenizer.vocabulary()
    return {
        **({"tokenizer_class": "PreTrainedTokenizerFast"} if has_pipeline else {}),
        "add_bos_token": tokenizer.bos_id is not None and tokenizer.usage.begins,
        "clean_up_tokenization_spaces": False,
        **tokenizer.named_tokens,
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Loads a `.model` file, a `tokenizer.json`, or what `Tokenizer.save` wrote.

    A `tokenizer.json` does not say which token ends a sequence: that is read from the files of
    a checkpoint beside it, as `jrl.text.json_tokenizer.checkpoint_tokenizer` does.

    Args:
      path: where the file is.
      vocab_size: ids of the network, which may have more than a tokenizer.json has tokens.

    Raises:
      ValueError: there is no such file, or it is no usable tokenizer.
    """
    path = Path(path)
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
    """The tokenizer of a file that begins as JSON: one that was saved, or a tokenizer.json."""
    try:
        record = json.loads(content)
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
