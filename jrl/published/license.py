"""License of a published checkpoint, as the head of its model card states it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CARD = "README.md"
KEYS = ("license", "license_name", "license_link")
"""Keys of a card's head; in a GGUF file general.license, general.license.name and .link."""


def license_in(folder: Path) -> dict[str, str]:
    """The license by `KEYS`, from the YAML head of README.md; empty if none is stated."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        head = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return {}
    return _stated(head) if isinstance(head, dict) else {}


def license_in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """As `license_in`, from the metadata of a GGUF file."""
    return _stated({key: metadata.get(_name_in_gguf(key)) for key in KEYS})


def gguf_license(folder: Path) -> dict[str, str]:
    """The license of a checkpoint folder as metadata of a GGUF file."""
    return {_name_in_gguf(key): text for key, text in license_in(folder).items()}


def write_license(folder: Path, license: Mapping[str, str]) -> None:
    """Writes README.md with this head and no text, if a license is stated."""
    if license:
        text = yaml.safe_dump(dict(license), sort_keys=False)
        (folder / CARD).write_text(f"---\n{text}---\n", encoding="utf-8")


def _name_in_gguf(key: str) -> str:
    return f"general.{key.replace('_', '.')}"


def _stated(head: Mapping[Any, Any]) -> dict[str, str]:
    texts = {key: head.get(key) for key in KEYS}
    return {key: text for key, text in texts.items() if isinstance(text, str) and text}
