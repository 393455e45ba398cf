"""JSON in the text of a call."""

import json
from collections.abc import Mapping
from typing import Any

from jrl.tasks.tools.calls import Call, unreadable

_DECODER = json.JSONDecoder()


def read_value(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins here, and the place behind it.

    Raises:
      ValueError: where there is none, in one line.
    """
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is no JSON ({error.msg}, character {error.pos - place + 1})"
        ) from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except ValueError:  # of a number with thousands of digits
        raise ValueError("it is no JSON that can be read") from None


def call_of(found: Any) -> Call:
    """The call in a JSON value: an object with a name, and arguments that are an object or the JSON
    text of one."""
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return unreadable("it is no JSON object with a name and arguments")
    name, identity = found["name"], found.get("id")
    given = found.get("arguments", found.get("parameters", {}))
    return arguments_of(name, given, identity if isinstance(identity, str) else "")


def arguments_of(name: str, given: Any, identity: str = "") -> Call:
    """The call with these arguments, an object or the JSON text of one."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return unreadable("its arguments are no JSON object", name)
    if not isinstance(given, Mapping):
        return unreadable("its arguments are no JSON object", name)
    return Call(name, dict(given), identity)


def written(value: Any) -> str:
    """The JSON text of a value, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
