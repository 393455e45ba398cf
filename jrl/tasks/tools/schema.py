"""JSON schemas of a function's arguments: generation from its types, and validation of values."""

import functools
import inspect
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Schema = Mapping[str, Any]

_SIMPLE: dict[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean"},
    **{list: "array", dict: "object", type(None): "null"},
}
_TYPE_PHRASES = {
    **{"string": "a string", "integer": "an integer", "number": "a number"},
    **{"boolean": "true or false", "array": "a list", "object": "an object", "null": "null"},
}
TYPES = "str, int, float, bool, list, dict, Literal, and unions of these"
MAX_NESTING = 64
"""Maximum nesting depth of schemas at which values are validated."""


def parameters_of(function: Callable[..., Any], about: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a function's arguments, as described in `jrl.tasks.tools.tool.Tool.of`."""
    name, inner = name_of(function), _unwrapped(function)
    hints = get_type_hints(inner if inspect.isroutine(inner) else type(inner).__call__)
    described = {**described_arguments(function), **about}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"the tool {name}: the argument {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{where} stands for any number of them: name each argument")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{where} cannot be given by its name: leave out the / after it")
        if parameter.name not in hints:
            raise ValueError(f"{where} has no type: annotate it with one of {TYPES}")
        schema = _schema_of(hints[parameter.name], where)
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            schema["default"] = _json_default(parameter.default, where)
        properties[parameter.name] = schema
    if unknown := sorted(set(about) - set(properties)):
        raise ValueError(
            f"the tool {name} has no argument {unknown[0]}: it has {_list_names(properties)}"
        )
    return {"type": "object", "properties": properties, "required": required}


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    function = _unwrapped(function)
    return getattr(function, "__name__", type(function).__name__)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def description_of(function: Callable[..., Any]) -> str:
    """The first paragraph of its docstring, on one line; empty if it has none."""
    text = inspect.getdoc(_unwrapped(function)) or ""
    return " ".join(re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].split())


def described_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """The descriptions of arguments in its docstring: of a section ``Args:``, or ``:param x:``."""
    lines = (inspect.getdoc(_unwrapped(function)) or "").splitlines()
    descriptions: dict[str, str] = {}
    name, indent, inside = "", 0, False
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if fields := re.match(r":param\s+(?:[\w\[\], |.]+\s)?(\w+)\s*:\s*(.*)", line.strip()):
            descriptions[fields[1]], name, inside = fields[2], fields[1], False
        elif re.fullmatch(r"(Args|Arguments|Parameters):", line.strip()):
            name, indent, inside = "", 0, True
        elif inside and not line.strip():
            name = ""
        elif inside and depth == 0:
            inside = False
        elif inside and (
            (not indent or depth <= indent)
            and (fields := re.match(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line.strip()))
        ):
            name, indent = fields[1], depth
            descriptions[name] = fields[2]
        elif name and line.strip() and depth:
            descriptions[name] += f" {line.strip()}"
        else:
            name = ""
    return {each: text.strip() for each, text in descriptions.items() if text.strip()}


def _schema_of(annotation: Any, where: str) -> dict[str, Any]:
    origin, options = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return {}
    if annotation in _SIMPLE:
        return {"type": _SIMPLE[annotation]}
    if origin is list:
        return {"type": "array", "items": _schema_of(options[0], where)}
    if origin is dict and options[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(options[1], where)}
    if origin is Literal:
        kinds = {_SIMPLE.get(type(option)) for option in options}
        if kinds <= {"string", "integer", "boolean", "null"}:
            kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
            return {**kind, "enum": list(options)}
    if origin in (Union, types.UnionType):
        each = [_schema_of(option, where) for option in options if option is not type(None)]
        if len(each) < len(options):
            # The notation of `transformers`, which chat templates expect.
            return {**(each[0] if len(each) == 1 else _any_of(each)), "nullable": True}
        return _any_of(each)
    type_name = getattr(annotation, "__name__", str(annotation))
    raise ValueError(f"{where} has the type {type_name}: a call is JSON, so use {TYPES}")


def _any_of(each: list[dict[str, Any]]) -> dict[str, Any]:
    simple = [schema["type"] for schema in each if set(schema) == {"type"}]
    return {"type": simple} if len(simple) == len(each) else {"anyOf": each}


def _json_default(value: Any, where: str) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} has the default {value!r}, which no JSON holds: use None"
        ) from None
    return value


def check_arguments(tool: str, arguments: Mapping[str, Any], parameters: Schema) -> dict[str, Any]:
    """Validates the arguments of a call and converts them to the schema's types: an integer may be
    written 3.0, and a number becomes a float.

    Raises:
      ValueError: for a missing or unknown argument, or one of another type, in one line.
    """
    properties = parameters.get("properties") or {}
    open_ended = parameters.get("additionalProperties", "properties" not in parameters)
    for name in parameters.get("required") or ():
        if name not in arguments:
            raise ValueError(f"{tool} needs the argument {name}")
    converted = {}
    for name, value in arguments.items():
        if name not in properties and not open_ended:
            raise ValueError(
                f"{tool} has no argument {_quote_name(name)}: it has {_list_names(properties)}"
            )
        converted[name] = check_value(
            value, properties.get(name) or {}, f"the argument {_quote_name(name)}"
        )
    return converted


def check_value(value: Any, schema: Any, where: str, depth: int = 0) -> Any:
    """Validates a value and converts it to the types of a schema at nesting level `depth`. Unknown
    keywords of the schema are ignored.

    Raises:
      ValueError: for a value that the schema does not allow, in one line.
    """
    if not isinstance(schema, Mapping) or depth > MAX_NESTING:
        return value
    if value is None and schema.get("nullable") is True:
        return None
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            return _check_any_of(value, schema[word], where, depth)
    kinds = types_of(schema)
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        wanted = " or ".join(_TYPE_PHRASES.get(kind, kind) for kind in kinds)
        raise ValueError(f"{where} is {shorten(value)}, which is not {wanted}")
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and not any(_equals(value, each) for each in allowed):
        one_of = ", ".join(json.dumps(each, ensure_ascii=False) for each in allowed)
        raise ValueError(f"{where} is {shorten(value)}, which is none of {one_of}"[:300])
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value) if "number" not in kinds else value
    if isinstance(value, int) and "number" in kinds and "integer" not in kinds:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where} is too large") from None
    if isinstance(value, list):
        items = schema.get("items")
        return [check_value(x, items, f"{where}[{n}]", depth + 1) for n, x in enumerate(value)]
    if isinstance(value, Mapping):
        return _check_object(value, schema, where, depth)
    return value


def _check_object(
    value: Mapping[str, Any], schema: Schema, where: str, depth: int
) -> dict[str, Any]:
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
    for name in schema.get("required") or ():
        if name not in value:
            raise ValueError(f"{where} lacks {name}")
    if others is False and (unknown := [name for name in value if name not in properties]):
        raise ValueError(f"{where} has {_quote_name(unknown[0])}, which it may not")
    return {
        name: check_value(
            each, properties.get(name, others), f"{where}.{_quote_name(name)}", depth + 1
        )
        for name, each in value.items()
    }


def _check_any_of(value: Any, options: Any, where: str, depth: int) -> Any:
    errors = []
    for option in options:
        try:
            return check_value(value, option, where, depth + 1)
        except ValueError as error:
            errors.append(str(error))
    if len(errors) == 1 or len({each.partition(" is ")[0] for each in errors}) > 1:
        raise ValueError(errors[0])
    wanted = " or ".join(
        _TYPE_PHRASES.get(kind, kind) for each in options for kind in types_of(each)
    )
    raise ValueError(f"{where} is {shorten(value)}, which is not {wanted}" if wanted else errors[0])


def types_of(schema: Any) -> list[str]:
    """The types that a schema and its options allow; empty if it names none."""
    if not isinstance(schema, Mapping):
        return []
    kind, null = schema.get("type"), ["null"] if schema.get("nullable") is True else []
    if isinstance(kind, str):
        return [kind, *null]
    if isinstance(kind, list):
        return [each for each in kind if isinstance(each, str)] + null
    options = schema.get("anyOf") or schema.get("oneOf") or ()
    return list(dict.fromkeys(each for option in options for each in types_of(option))) + null


def parse_argument(text: str, schema: Any) -> Any:
    """Parses an argument that a format writes without quotes.

    The value is the text if the schema has a string there; else the value of the text as JSON, or
    the text if it is not JSON.
    """
    kinds = types_of(schema)
    if isinstance(schema, Mapping) and not kinds and text in (schema.get("enum") or ()):
        return text
    if kinds == ["string"]:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # Python's spelling of them, which policies use by mistake.
        word = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        return word if any(_has_type(word, kind) for kind in kinds) else text
    if "string" in kinds and not any(_has_type(value, kind) for kind in kinds if kind != "string"):
        return text
    return value


def _has_type(value: Any, kind: str) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return kind not in _TYPE_PHRASES
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    kinds = {"string": str, "array": list, "object": Mapping, "null": type(None)}
    # A type that JSON schema does not define is an error of the schema: any value is accepted.
    return isinstance(value, kinds.get(kind, object))


def _equals(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _list_names(properties: Mapping[str, Any]) -> str:
    return ", ".join(properties) or "none"


def _quote_name(name: str) -> str:
    """A name in a message, quoted unless it is an identifier."""
    return name if re.fullmatch(r"\w{1,40}", name) else shorten(name)


def shorten(value: Any, length: int = 60) -> str:
    """The JSON of a value for a message, cut to a length in characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= length else text[: length - 3] + "..."
