"""Name and license of the published checkpoint that a run started from, for those who get what it
made."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OPTION = "_name_or_path"
"""Option of config.json with the name that a checkpoint was loaded by."""
HUB = "https://huggingface.co/"
CARD = "README.md"
LICENSE_KEYS = ("license", "license_name", "license_link")
"""Keys of the license in the head of a card; in GGUF they begin with general."""


def base_name(stated: str | None, model: str, options: Mapping[str, Any]) -> str:
    """The stated name, else the name in the checkpoint's metadata, else the user's name for it.

    Args:
      stated: ``--base-name``.
      model: ``--model`` of the run.
      options: config.json of the checkpoint.
    """
    if stated is not None:
        return stated
    recorded = options.get(OPTION)
    if isinstance(recorded, str) and recorded and not Path(recorded).is_absolute():
        return recorded
    return model.removeprefix("hf:")


def is_hub_name(name: str) -> bool:
    """True for OWNER/NAME of the Hugging Face Hub, which loads on any machine."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def note_on_base(name: str) -> str | None:
    """Line about a name that other machines cannot load; None for a name of the Hub."""
    if is_hub_name(name):
        return None
    return (
        f"note: the base is named {name!r}, which other machines may not find: give "
        "--base-name OWNER/NAME if it is published"
    )


def name_in_gguf(metadata: Mapping[str, Any]) -> str | None:
    """The name of a GGUF file's model: its repository, the repository of its base model, or its
    title."""
    for key in ("general.source.huggingface.repository", "general.base_model.0.repo_url"):
        if value := metadata.get(key):
            return str(value).removeprefix(HUB).strip("/")
    title = metadata.get("general.name")
    return None if not title else str(title)


def license_in(folder: Path) -> dict[str, str]:
    """The license by `LICENSE_KEYS`, from the YAML head of README.md; empty if none is stated."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        head = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return {}
    return _stated(head) if isinstance(head, dict) else {}


def license_in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """As `license_in`, from the metadata of a GGUF file."""
    return _stated({key: metadata.get(_gguf_key(key)) for key in LICENSE_KEYS})


def gguf_license(folder: Path) -> dict[str, str]:
    """The license of a checkpoint folder as metadata of a GGUF file."""
    return {_gguf_key(key): text for key, text in license_in(folder).items()}


def write_license(folder: Path, license: Mapping[str, str]) -> None:
    """Writes README.md with this head and no text, if a license is stated."""
    if license:
        text = yaml.safe_dump(dict(license), sort_keys=False)
        (folder / CARD).write_text(f"---\n{text}---\n", encoding="utf-8")


def _gguf_key(key: str) -> str:
    return f"general.{key.replace('_', '.')}"


def _stated(head: Mapping[Any, Any]) -> dict[str, str]:
    texts = {key: head.get(key) for key in LICENSE_KEYS}
    return {key: text for key, text in texts.items() if isinstance(text, str) and text}
