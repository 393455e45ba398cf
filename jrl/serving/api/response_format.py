"""Form of the response that a request demands: text, or JSON of a schema."""

from collections.abc import Mapping
from typing import Any

from jrl.serving.api.errors import invalid_argument
from jrl.tasks.data.fields import short

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of `json_object`."""
SHAPES = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
    '{"name": ..., "schema": {...}}}'
)


def response_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """JSON schema of the response; None for any text.

    Raises:
      ApiError: for an unknown format, and for a schema that is no object.
    """
    value = body.get("response_format")
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return ANY_OBJECT
    stated = value.get("json_schema") if isinstance(value, dict) else None
    if not isinstance(stated, dict) or value.get("type") != "json_schema":
        raise invalid_argument(
            "response_format", f"response_format={short(value)} must be {SHAPES}."
        )
    schema = stated.get("schema")
    if not isinstance(schema, dict):
        where = "response_format.json_schema.schema"
        raise invalid_argument(where, f"{where}={short(schema)} must be a JSON schema.")
    return schema
