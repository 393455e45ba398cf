"""Token ids of a checkpoint's tokenizer.json, which other files beside it state again."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jrl.text.checkpoint_files import CONFIG, read_optional

ADDED = "added_tokens.json"


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
            found = backend.token_to_id(token)
            if found != identity:
                has = "does not have it" if found is None else f"has {found}"
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
