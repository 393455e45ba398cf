"""JSON of a checkpoint's files, in which no key has two values."""

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is not JSON, or an object has a key twice with different values, of which
        other readers take one or the other.
      RecursionError: it is nested too deeply.
    """
    return json.loads(content, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if value != values[key]:
                raise ValueError(
                    f"the key {key!r} comes twice, with {_short(value)} and {_short(values[key])}: "
                    "keep one"
                )
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
