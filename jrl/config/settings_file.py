"""Settings file: ``--config run.yaml`` contains flags and their values; flags on the command line
take precedence.

The file is YAML 1.2, a flag a line, its name with underscores or hyphens: ``learning_rate: 1e-6``.
``recipe`` is the first word of a command line. Settings may also be grouped under ``run`` and
``hyperparameters``, as in a run's config.json, itself a settings file.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from jrl.checks import check_numbers, flag
from jrl.config.files import convert_value, has_type, type_name
from jrl.setting import replacement_of

RECIPE, GROUPS = "recipe", ("run", "hyperparameters")
PREFIX = "preset:"
"""Prefix of the name of a file that comes with the library."""
PRESETS = Path(__file__).parent / "presets"
DATA = "# Data: "
"""Beginning of the comment with the command that downloads the files of a preset."""

Config = TypeVar("Config")

_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Scalars that are not strings: the core schema of YAML 1.2, with decimal integers without leading
zeros only. By YAML 1.1, the default of the yaml library, 1e-6 is a string and `no` is not."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} is there twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _tag, _pattern, _begins in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _begins
        )


@dataclass(frozen=True)
class Settings:
    """Parsed settings file.

    Attributes:
      path: the file; the path of a recipe of the user's own is relative to its folder.
      recipe: the recipe that it names; None if it names no recipe.
      values: of all other settings, by the names of their fields.
      data: command that downloads the files of a preset; None if it needs none.
    """

    path: Path
    recipe: str | None
    values: Mapping[str, Any]
    data: str | None = None

    def check_data(self, files: Mapping[str, str | None]) -> None:
        """Raises ValueError for the first file of a preset's data that is missing.

        Args:
          files: of the run, by the names of their settings.
        """
        for name, file in files.items():
            if self.data is None or file is None or file != self.values.get(name):
                continue
            path = Path(file.partition(":")[2] or file)
            if not path.exists():
                raise ValueError(f"{name}={file!r}: {path} is missing; to get it: {self.data}")

    def check_names(self, *kinds: type, command_line_only: Sequence[str] = ()) -> None:
        """Raises ValueError for the first setting that is no field of these dataclasses, or is one
        for the command line only."""
        field_names = [field.name for kind in kinds for field in fields(kind)]
        for name in self.values:
            if name in command_line_only:
                raise ValueError(
                    f"{self.path}: {name} is only for the command line: leave it out here and "
                    f"give {flag(name)} there."
                )
            if name not in field_names:
                usable = [other for other in field_names if other not in command_line_only]
                near = difflib.get_close_matches(name, [RECIPE, *usable], n=2)
                hint = f"near: {', '.join(near)}" if near else "--help lists them"
                raise ValueError(f"{self.path}: {name} is not a setting of this recipe; {hint}.")

    def apply_to(self, config: Config) -> Config:
        """Copy of a dataclass with the values of its fields from the file; ValueError for one of
        another type."""
        hints, changes = get_type_hints(type(config)), {}
        for field in fields(config):  # pyright: ignore[reportArgumentType]
            if field.name not in self.values:
                continue
            value, kind = self.values[field.name], hints[field.name]
            if not has_type(value, kind):
                raise ValueError(
                    f"{self.path}: {field.name} is {value!r}, not {type_name(kind)}"
                    f"{_suggest_value(type(config), field.name, value, kind)}."
                )
            changes[field.name] = convert_value(value, kind)
        try:
            changed = replace(config, **changes)  # pyright: ignore[reportArgumentType]
            check_numbers(changed)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        return changed


def read_settings(reference: str) -> Settings:
    """Reads a settings file, or one that comes with the library (``preset:NAME``); ValueError if
    the file is missing, is not YAML, or names a setting twice."""
    is_preset = reference.startswith(PREFIX)
    path = _preset_path(reference) if is_preset else Path(os.path.expanduser(reference))
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, _Loader)
    except OSError as error:
        raise ValueError(
            f"config={reference!r} cannot be read ({error.strerror}): give a YAML file of settings."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: give a YAML file of settings.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {_error_text(error)}.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be settings: name: value.") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not settings: name: value.")
    values: dict[str, Any] = {}
    for name, value in _flatten(content):
        if name in values:
            raise ValueError(f"{path}: {name} occurs twice: leave one out.")
        values[name] = value
    recipe = values.pop(RECIPE, None)
    if recipe is not None and not isinstance(recipe, str):
        raise ValueError(f"{path}: recipe is {recipe!r}, not the name of a recipe.")
    lines = text.splitlines() if is_preset else []
    data = [line.removeprefix(DATA) for line in lines if line.startswith(DATA)]
    return Settings(path, recipe, values, data[0] if data else None)


def settings_text(config: Mapping[str, Any], comment: str = "") -> str:
    """YAML text of the settings file that repeats a run with this config.json, after a comment."""
    flat = {RECIPE: config[RECIPE]}
    for group in GROUPS:
        for name, value in config[group].items():
            flat[name] = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(flat, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return f"# {comment}\n{text}" if comment else text


def _suggest_value(record: type, name: str, value: Any, kind: Any) -> str:
    """Advice on the right value in place of a value of another type; empty if it is not clear."""
    if (other := replacement_of(record, name, value)) is not None:
        return f": write {name}: {other}"
    if has_type([value], kind):
        return f": write {name}: {json.dumps([value])}"  # JSON is YAML too
    if isinstance(value, dict) and has_type("", kind):
        return f": write it as a text, {name}: '{json.dumps(value)}'"
    booleans = {"yes": "true", "on": "true", "no": "false", "off": "false"}
    if isinstance(value, str) and value.lower() in booleans and has_type(True, kind):
        return f": write {name}: {booleans[value.lower()]}"
    return ""


def _flatten(content: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Flattens groups into one list of names and values."""
    pairs: list[tuple[str, Any]] = []
    for name, value in content.items():
        if name in GROUPS and isinstance(value, dict):
            pairs += _flatten(value)
        else:
            pairs.append((str(name).replace("-", "_"), value))
    return pairs


def _preset_path(reference: str) -> Path:
    name = reference.removeprefix(PREFIX)
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
        raise ValueError(f"config={reference!r} is not a preset; near: {', '.join(near)}.")
    return PRESETS / f"{name}.yaml"


def _error_text(error: Exception) -> str:
    """One-line message of a YAML error."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error).splitlines()[0]
    mark = error.problem_mark
    position = "" if mark is None else f" (line {mark.line + 1})"
    return f"{error.problem}{position}"
