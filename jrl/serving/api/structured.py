"""Rules that the text of a choice must follow: a JSON schema, a regular expression, a choice of
texts, or a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jrl.serving.api.fields import invalid_argument, invalid_value
from jrl.serving.api.tools import ANY_OBJECT, response_schema
from jrl.tasks.data.fields import short

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Members of `structured_outputs`, one of which a request gives."""
GUIDED = {f"guided_{kind}": kind for kind in KINDS}
STRUCTURED_ARGUMENTS = ("response_format", "structured_outputs", *GUIDED)
MAX_CHOICES = 1000


@dataclass(frozen=True)
class TextRule:
    """Rule of a text.

    Attributes:
      param: argument that gives it, for errors.
      value: a JSON schema, a regular expression, texts to choose from, or a grammar in llguidance's
        variant of Lark.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    param: str
    value: Any


def text_rule(body: Mapping[str, Any]) -> TextRule | None:
    """The rule of a request's text, None for any text; raises ApiError for an invalid one and for
    more than one."""
    rules = [_rule(kind, name, body[name]) for name, kind in GUIDED.items() if name in body]
    rules += _structured(body.get("structured_outputs"))
    if (schema := response_schema(body)) is not None:
        rules.append(TextRule("json", "response_format", schema))
    stated = [rule for rule in rules if rule is not None]
    if len(stated) > 1:
        params = " and ".join(rule.param for rule in stated)
        raise invalid_argument(stated[1].param, f"{params} exclude each other: give one of them.")
    return stated[0] if stated else None


def _structured(value: Any) -> list[TextRule | None]:
    if value is None:
        return []
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid_value(name, value, f"an object with one of {', '.join(KINDS)}")
    rules: list[TextRule | None] = []
    for kind, rule in value.items():
        if kind in KINDS:
            rules.append(_rule(kind, f"{name}.{kind}", rule))
        elif rule not in (None, False):
            raise invalid_argument(
                f"{name}.{kind}",
                f"{name}.{kind}={short(rule)} is not supported: leave it out.",
                "unsupported_parameter",
            )
    return rules


def _rule(kind: str, param: str, value: Any) -> TextRule | None:
    if value is None or (kind == "json_object" and value is False):
        return None
    if kind in ("json", "json_object"):
        return TextRule("json", param, _schema(kind, param, value))
    if kind == "choice":
        texts = value if isinstance(value, list) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise invalid_value(param, value, "a list of texts that are not empty")
        if len(texts) > MAX_CHOICES:
            raise invalid_argument(
                param, f"{param} has {len(texts)} texts: give {MAX_CHOICES} at most."
            )
        return TextRule("choice", param, tuple(texts))
    if not isinstance(value, str) or not value:
        raise invalid_value(param, value, "a text that is not empty")
    return TextRule("regex" if kind == "regex" else "grammar", param, value)


def _schema(kind: str, param: str, value: Any) -> Mapping[str, Any]:
    if kind == "json_object":
        if value is not True:
            raise invalid_value(param, value, "true or false")
        return ANY_OBJECT
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise invalid_value(param, value, "a JSON schema")
    return schema
