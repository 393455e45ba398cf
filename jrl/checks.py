"""Checks of numeric settings and of installed packages, and the flags that messages name."""

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import ModuleType
from typing import Any, get_args, get_type_hints


def flag(field: str) -> str:
    """Command-line flag of a field."""
    return "--" + field.replace("_", "-")


def check_seed(seed: int) -> None:
    """Raises ValueError unless ``0 <= seed < 2**32``.

    JAX keeps 32 bits of a seed: beyond them two seeds would be equal.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must lie in 0..4294967295.")


def check_numbers(settings: Any) -> None:
    """Raises ValueError for the first numeric field of a dataclass, or of one in its fields, whose
    value is no finite number, or no whole number in a field of whole numbers.

    A field is numeric if its annotation contains int or float and no text: ``int``,
    ``float | None``, ``tuple[float, ...]``.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            check_numbers(value)
            continue
        kind = _numeric_fields(type(settings)).get(field.name)
        if kind is not None:
            for item in value if isinstance(value, list | tuple) else (value,):
                _check_number(field.name, item, kind)


@cache
def _numeric_fields(kind: type) -> Mapping[str, type]:
    """Type of each numeric field of a dataclass, int or float."""
    numeric, hints = {}, get_type_hints(kind)
    for field in fields(kind):
        leaves = _leaf_types(hints[field.name])
        if leaves & {int, float} and not leaves & {str, bool}:
            numeric[field.name] = float if float in leaves else int
    return numeric


def _leaf_types(annotation: Any) -> set[Any]:
    """The types in an annotation: int and None in ``int | None``."""
    options = get_args(annotation)
    return set().union(*map(_leaf_types, options)) if options else {annotation}


def _check_number(name: str, value: Any, kind: type) -> None:
    if value is None:
        return
    if kind is int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be a whole number, such as 8.")
    elif not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number.")


def check_range(
    settings: object,
    names: Iterable[str],
    low: int | float,
    high: int | float = math.inf,
    *,
    above: bool = False,
) -> None:
    """Raises ValueError for the first of these settings that is outside of ``low <= x <= high``, or
    of ``low < x <= high`` where `above`, or NaN; None and missing settings are skipped."""
    for name in names:
        value = getattr(settings, name, None)
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a number.")
        if value is None or (low <= value <= high and not (above and value == low)):
            continue
        rule = f"must be {'above' if above else 'at least'} {low:g}"
        if high < math.inf:
            rule = f"must lie in {low:g}..{high:g}" + (f", above {low:g}" if above else "")
        raise ValueError(f"{name}={value} {rule}.")


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional package, which an extra of pyproject.toml installs.

    Raises:
      ValueError: where it is not installed; `purpose` is what needs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is there, and something it needs is not
            raise
        package = module.replace("_", "-")
        raise ValueError(
            f'{purpose} needs the package {package}: pip install -e ".[{extra}]".'
        ) from None
