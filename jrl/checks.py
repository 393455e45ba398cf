"""Checks of numeric settings and of installed packages, and the flags that messages name."""

import importlib
import math
from collections.abc import Iterable
from types import ModuleType


def flag(field: str) -> str:
    """Command-line flag of a field."""
    return "--" + field.replace("_", "-")


def check_seed(seed: int) -> None:
    """Raises ValueError unless ``0 <= seed < 2**32``.

    JAX keeps 32 bits of a seed: beyond them two seeds would be equal.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must lie in 0..4294967295.")


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
