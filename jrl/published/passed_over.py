"""Files of a checkpoint's folder that hold again what others hold, and are not read."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jrl.text.checkpoint_files import CONFIG, TEMPLATE, TEMPLATES, read_optional
from moe.huggingface.checkpoint import INDEX, SINGLE_FILE, weight_files


def files_passed_over(folder: Path) -> list[str]:
    """A phrase for each file that is not read, with the one that is.

    Weights of other formats and names are always listed; tokenizers and chat templates if they
    differ from those that are read.
    """
    chosen, others = weight_files(folder)
    others += [*sorted(folder.glob("*.gguf")), *sorted(folder.glob("pytorch_model*.bin"))]
    read = (
        INDEX if (folder / INDEX).exists() else SINGLE_FILE if len(chosen) == 1 else chosen[0].name
    )
    phrases = [f"{path.name} ({read} is read)" for path in others]
    return [*phrases, *_vocabularies(folder), *_templates(folder)]


def _vocabularies(folder: Path) -> list[str]:
    pipeline = read_optional(folder / "tokenizer.json")
    tokens = _tokens(pipeline)
    if not tokens:
        return []
    phrases = []
    listed = read_optional(folder / "vocab.json")
    vocabularies = {"vocab.json": listed, "tokenizer.model": _pieces(folder / "tokenizer.model")}
    for name, other in vocabularies.items():
        # A token of one file alone may have been added or renamed after training.
        differing = [token for token, i in other.items() if tokens.get(token, i) != i]
        if differing:
            token = differing[0]
            phrases.append(
                f"{name}, which differs (tokenizer.json is read: {token!r} is {tokens[token]} "
                f"there and {other[token]} here)"
            )
    return phrases


def _tokens(pipeline: dict[str, Any]) -> dict[str, int]:
    """Ids by token of a tokenizer.json."""
    vocabulary = (pipeline.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {piece: identity for identity, (piece, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in pipeline.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _pieces(path: Path) -> dict[str, int]:
    """Ids by piece of a SentencePiece model; none if the file is of another kind."""
    if not path.is_file() or find_spec("sentencepiece") is None:
        return {}
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:  # Mistral and Llama 3 give files of tiktoken this name
        return {}
    return {processor.IdToPiece(i): i for i in range(processor.vocab_size())}


def _templates(folder: Path) -> list[str]:
    path = folder / TEMPLATE
    texts = {
        TEMPLATE: path.read_text(encoding="utf-8") if path.is_file() else None,
        f"chat_template of {CONFIG}": read_optional(folder / CONFIG).get("chat_template"),
        TEMPLATES: read_optional(folder / TEMPLATES).get("chat_template"),
    }
    stated = {name: json.dumps(text) for name, text in texts.items() if text is not None}
    read = next(iter(stated), None)
    return [
        f"{name}, which differs ({read} is read)"
        for name, text in stated.items()
        if read is not None and text != stated[read]
    ]
