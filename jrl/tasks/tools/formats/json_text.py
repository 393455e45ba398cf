"""JSON in the text of a call."""

import json
from collections.abc import Mapping
from typing import Any

from jrl.tasks.tools.calls import Call, unreadable_call

_DECODER = json.JSONDecoder()


def read_value(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins here, and the position behind it.

    Raises:
      ValueError: where there is none, in one line.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is no JSON ({error.msg}, character {error.pos - position + 1})"
        ) from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except ValueError:  # of a number with thousands of digits
        raise ValueError("it is no JSON that can be read") from None


def parse_call(value: Any) -> Call:
    """The call in a JSON value: an object with a name, and arguments that are an object or the JSON
    text of one."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return unreadable_call("it is no JSON object with a name and arguments")
    name, identity = value["name"], value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(name, arguments, identity if isinstance(identity, str) else "")


def make_call(name: str, arguments: Any, identity: str = "") -> Call:
    """The call with these arguments, an object or the JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return unreadable_call("its arguments are no JSON object", name)
    if not isinstance(arguments, Mapping):
        return unreadable_call("its arguments are no JSON object", name)
    return Call(name, dict(arguments), identity)


def to_json(value: Any) -> str:
    """The JSON text of a value, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
