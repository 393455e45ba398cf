"""Files of a public checkpoint beside its weights: settings of the tokenizer, chat template,
generation settings. Reading them needs no extra.

A run that starts from a checkpoint keeps the small ones (`copy_checkpoint_files`), so that its
exports have the checkpoint's settings of tokens and sampling, even if the checkpoint was moved.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.text.tokenizer import Tokenizer
from moe.huggingface.json_file import parse_json

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
"""Optional files of a checkpoint beside its vocabulary."""


def copy_checkpoint_files(checkpoint: Path, folder: Path) -> None:
    """Copies those files of a checkpoint that are in `COPIED_FILES`."""
    folder.mkdir(exist_ok=True)
    for name in COPIED_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def checkpoint_files(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    """Contents of the files by name.

    Files copied by `copy_checkpoint_files` are unchanged except for two settings of the run: its
    chat template, and in generation_config.json all ids that end a completion, which the checkpoint
    may name in several files. Other files are made from the tokenizer.

    Args:
      folder: target of `copy_checkpoint_files`, which need not exist.

    Raises:
      ValueError: if one of the copied files is not JSON.
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
    ids = token_ids(tokenizer)
    updated = {**ids, **generation, "eos_token_id": ids["eos_token_id"]}
    if updated != generation:
        files[GENERATION] = _json(updated)
    return files | tokenizer.vocabulary()


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The special ids by their names in config.json and generation_config.json."""
    begins = {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
    ends = list(tokenizer.stop_ids)
    eos = ends[0] if len(ends) == 1 else ends
    return {**begins, "eos_token_id": eos, "pad_token_id": tokenizer.pad_id}


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


def chat_template_in(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a checkpoint with this tokenizer_config.json, from the places that its
    tokenizer reads."""
    jinja_path = directory / TEMPLATE
    if jinja_path.exists():
        return _read_text(jinja_path)
    json_path, template = directory / CONFIG, config.get("chat_template")
    if template is None:
        json_path = directory / TEMPLATES
        template = read_optional(json_path).get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        if len(by_name) < len(template):
            raise ValueError(f"{json_path}: chat_template has two entries of one name: keep one.")
        if "default" not in by_name:
            raise ValueError(
                f"{json_path}: chat_template has {', '.join(map(repr, by_name)) or 'no template'}, "
                "of which none is called 'default': write one into a file and give --chat-template "
                "FILE."
            )
        template = by_name["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{json_path}: chat_template is a {type(template).__name__}, not a text or a list of "
            "named texts: take the file of the checkpoint."
        )
    return template


def read_optional(path: Path) -> dict[str, Any]:
    """As `read_object`, but empty if there is no file."""
    return read_object(path) if path.exists() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Reads the object of a JSON file.

    Raises:
      ValueError: if it cannot be read, or does not contain an object.
    """
    try:
        record = parse_json(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}, not an object.")
    return record


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error
