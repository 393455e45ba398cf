"""Configuration of a run as stored in its ``config.json``: the run, the recipe, all their fields.

Reading is strict: a field that is unknown or of another type is rejected, so that a run is repeated
as it was or not at all. A field that the file lacks was added after the run, and has its default.
"""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxtyping import Array

from jrl.checks import flag
from jrl.config.run import RunConfig
from jrl.recipes import ActorCritic, Batch, Ppo, Recipe, Sft, Targets
from jrl.recipes.load import load_recipe, read_recipe, reference_of
from jrl.runs.folder import RunFolder
from jrl.runs.trust import check_trusted
from jrl.setting import names_with, replacement_of, value_before

Record = TypeVar("Record")


@dataclass(frozen=True)
class Sampled(Recipe):
    """Stand-in for a custom recipe that is sampled from and not trained."""

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        raise NotImplementedError


def to_json(run: RunConfig, recipe: Recipe) -> dict[str, Any]:
    """JSON object of a run and its recipe, from which `from_json` restores both.

    Raises:
      ValueError: for what `from_json` would reject: a field of another type, a recipe that has no
        file.
    """
    for record in (run, recipe):
        _check_types(record)
    return {"recipe": reference_of(recipe), "run": asdict(run), "hyperparameters": asdict(recipe)}


def from_json(
    config: Mapping[str, Any], path: Path | str, recipe: bytes | None = None
) -> tuple[RunConfig, Recipe]:
    """Restores the run and the recipe from the JSON object of `to_json`.

    Args:
      path: the file that the configuration was read from; the path of a recipe of the user's own
        is relative to its folder.
      recipe: content of that recipe's file; None reads it.

    Raises:
      ValueError: for a field that is unknown or of another type, or an unknown recipe.
    """
    _check_names(config, ("recipe", "run", "hyperparameters"), "", path)
    name = config["recipe"]
    if not isinstance(name, str):
        raise ValueError(f"{path}: recipe is {name!r}, not the name of a recipe.")
    try:
        kind = load_recipe(name, Path(path).parent, recipe)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    run = _record(RunConfig, config["run"], "run", path)
    return run, _record(kind, config["hyperparameters"], "hyperparameters", path)


def changeable_settings(kind: type) -> list[str]:
    """Names of the fields that a resumed run may change: none of them changes what a step computes.
    Steps only grow; another layout or micro-batch sums in another order, which changes the
    rounding."""
    return names_with(kind, "changeable")


def fixed_settings(run: RunConfig, recipe: Recipe) -> dict[str, Any]:
    """Recipe name and every field that a resumed run may not change, as JSON values."""
    config = to_json(run, recipe)
    settings = {"recipe": config["recipe"], **config["run"], **config["hyperparameters"]}
    changeable = {*changeable_settings(RunConfig), *changeable_settings(type(recipe))}
    unchangeable = {name: value for name, value in settings.items() if name not in changeable}
    return json.loads(json.dumps(unchangeable))


def configuration_of(folder: RunFolder, recipe: bytes | None = None) -> tuple[RunConfig, Recipe]:
    """Run and recipe of a run folder.

    Args:
      recipe: trusted content of the file of a custom recipe; None reads the file, and raises
        ValueError for a recipe that the user has not given to a command (`jrl.runs.trust`).
    """
    config = folder.config()
    if recipe is None:
        recipe = read_recipe(config.get("recipe"), folder.path)
        check_trusted(folder.path, {} if recipe is None else {folder.recipe_path.name: recipe})
    return from_json(config, folder.config_path, recipe)


def run_of(folder: RunFolder) -> RunConfig:
    """Settings of a run folder except for its recipe's, whose code is not loaded."""
    return _record(RunConfig, folder.config().get("run"), "run", folder.config_path)


def recipe_to_sample(folder: RunFolder) -> Recipe:
    """Recipe of a run folder for sampling and evaluation. The code of a custom recipe is not
    loaded: a stand-in of the same name has its settings of sampling and its batch sizes."""
    config, path = folder.config(), folder.config_path
    reference, values = config.get("recipe"), config.get("hyperparameters")
    file, _, class_name = str(reference).rpartition(":")
    if not file:  # a name, whose class is one of the library
        return from_json(config, path)[1]
    if not (class_name.isidentifier() and isinstance(values, Mapping)):
        raise ValueError(
            f"{path}: recipe {reference!r} with hyperparameters {values!r} is no recipe: put the "
            "file back as it was."
        )
    kind = next(
        stand_in
        for base, stand_in in ((Sft, Sft), (ActorCritic, Ppo), (Recipe, Sampled))
        if base is Recipe or all(field.name in values for field in fields(base))
    )
    names = [name for name in names_with(kind, "sampled") if name in values]
    settings = {**asdict(kind()), **{name: values[name] for name in names}}
    named_kind: Any = type(class_name, (kind,), {"__doc__": kind.__doc__})
    return _record(named_kind, settings, "hyperparameters", path)


def check_resumable(stored: tuple[RunConfig, Recipe], requested: tuple[RunConfig, Recipe]) -> None:
    """Raises ValueError for settings under which a resumed run would be another, with every flag
    that may not differ, its value in the run and the new one."""
    for record in requested:
        for field in fields(record):
            value = getattr(record, field.name)
            if (other := replacement_of(type(record), field.name, value)) is not None:
                raise ValueError(
                    f"{field.name}={value!r} of the run is not in this version: give "
                    f"{flag(field.name)} {other}."
                )
    differences = list(_differences(stored, requested))
    if differences:
        raise ValueError(
            f"a resumed run keeps its settings: {'; '.join(differences)}. "
            "Leave these flags out, or start a new run."
        )


def _differences(
    stored: tuple[RunConfig, Recipe], requested: tuple[RunConfig, Recipe]
) -> Iterator[str]:
    for before, after in zip(stored, requested, strict=True):
        kind = type(before)
        changeable = set(changeable_settings(kind))
        if stored[0].stale_cache:
            # Checkpoints store the KV cache in the layout that the layers read.
            changeable -= {*names_with(kind, "cache")}
        for field in fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if field.name == "steps" and new < old:
                yield f"--steps is {old} in the run and can only be raised, {new} was given"
            elif old != new and field.name not in changeable:
                yield f"{flag(field.name)} is {old} in the run, {new} was given"


def _record(kind: type[Record], values: Any, name: str, path: Path | str) -> Record:
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: {name} is {values!r}, not an object.")
    hints = get_type_hints(kind)
    items = fields(kind)  # pyright: ignore[reportArgumentType]
    names = [item.name for item in items]
    defaults = {item.name: value_before(kind, item) for item in items}
    defaults = {name: value for name, value in defaults.items() if value is not MISSING}
    values = defaults | dict(values)
    _check_names(values, names, f"{name}.", path)
    for field in names:
        is_removed = replacement_of(kind, field, values[field]) is not None
        if not is_removed and not has_type(values[field], hints[field]):
            raise ValueError(
                f"{path}: {name}.{field} is {values[field]!r}, not {type_name(hints[field])}."
            )
    try:
        return kind(**{field: convert_value(values[field], hints[field]) for field in names})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_types(record: RunConfig | Recipe) -> None:
    hints = get_type_hints(type(record))
    for field in fields(record):
        value, annotation = getattr(record, field.name), hints[field.name]
        try:
            stored = json.loads(json.dumps(value))
        except TypeError:
            stored = value
        if not has_type(stored, annotation):
            raise ValueError(
                f"{field.name}={value!r} is not {type_name(annotation)}, so that the run could "
                "not be read again: convert it."
            )


def _check_names(
    values: Mapping[str, Any], names: tuple[str, ...] | list[str], prefix: str, path: Path | str
) -> None:
    unknown = [prefix + name for name in values if name not in names]
    missing = [prefix + name for name in names if name not in values]
    if unknown or missing:
        complaints = [f"unknown {', '.join(unknown)}"] if unknown else []
        complaints += [f"missing {', '.join(missing)}"] if missing else []
        raise ValueError(
            f"{path} is not a configuration of this version: {'; '.join(complaints)}. Use the "
            "version that wrote it, or fix the file."
        )


def has_type(value: Any, annotation: Any) -> bool:
    """True if a JSON value is of this type. A whole number is valid for a float."""
    origin, options = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(has_type(value, option) for option in options)
    if origin is Literal:
        return isinstance(value, str) and value in options
    if origin is tuple:
        return isinstance(value, list | tuple) and all(has_type(item, options[0]) for item in value)
    if annotation is float:
        # Only whole numbers within the range of a float.
        return type(value) is float or (type(value) is int and abs(value) < 2**1023)
    return type(value) is annotation


def convert_value(value: Any, annotation: Any) -> Any:
    """Converts a valid JSON value to the type of its field: lists to tuples, numbers to floats."""
    if isinstance(value, list):
        return tuple(value)
    if type(value) is int and float in (annotation, *get_args(annotation)):
        return float(value)
    return value


def type_name(annotation: Any) -> str:
    """Name of a type for error messages."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"a list of {type_name(get_args(annotation)[0])}"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
