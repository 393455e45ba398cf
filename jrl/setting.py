"""Declaration of a setting: a dataclass field with its range and what it is to a run.

A record of settings is in the module of the component that reads it, and a run's settings are all
of these records (`jrl.config.run`). What a field is, is said at the field::

    steps: int = setting(60, minimum=0, changeable=True)
"""

import math
from dataclasses import MISSING, Field, field, fields
from inspect import get_annotations
from typing import Any

from jrl.checks import check_numbers, check_range


def setting(
    default: Any,
    *,
    minimum: int | float | None = None,
    above: int | float | None = None,
    maximum: int | float | None = None,
    **properties: Any,
) -> Any:
    """A field of a record of settings.

    Args:
      minimum: least value; None is any.
      above: number that the value must exceed; None is any.
      maximum: greatest value; None is any.
      **properties: any of

        * ``changeable``: true if a resumed run may change it, as it changes no more than the
          rounding of what a step computes; false by default, or the record's ``CHANGEABLE``;
        * ``before``: value that keeps the behaviour of a run that was written before the setting
          existed, if another than the default;
        * ``sft``: false if it has no effect in supervised fine-tuning and is no flag there, or its
          help text there;
        * ``of_task``: true if it is chosen for the task, so that an evaluation on another task
          starts from the default;
        * ``in_file``: false if only the command line has it, not a settings file;
        * ``removed``: names of earlier versions, each with the one to choose instead. A run folder
          may have them, a resumed run must change them;
        * ``sampled``: true for a hyperparameter that sampling and evaluation need, read from a run
          whose custom recipe is not loaded;
        * ``override``: false if a flag of another command does not replace the run's setting of the
          same name.
    """
    names = {"changeable", "before", "sft", "of_task", "in_file", "sampled", "override", "removed"}
    if unknown := properties.keys() - names:
        raise TypeError(f"setting() has no property {', '.join(sorted(unknown))}.")
    bounds = {"minimum": minimum, "above": above, "maximum": maximum}
    declared = {key: value for key, value in bounds.items() if value is not None}
    return field(default=default, metadata={**declared, **properties})


def check_settings(record: Any) -> None:
    """Raises ValueError for the first number that is not finite, not whole in a field of counts, or
    outside of the range that its field declares."""
    check_numbers(record)
    kind = type(record)
    for item in fields(record):
        if isinstance(getattr(record, item.name), tuple):
            continue
        minimum, above = (property_of(kind, item.name, key) for key in ("minimum", "above"))
        maximum = property_of(kind, item.name, "maximum", math.inf)
        if above is not None:
            check_range(record, (item.name,), above, maximum, above=True)
        elif minimum is not None:
            check_range(record, (item.name,), minimum, maximum)


def property_of(kind: type, name: str, key: str, default: Any = None) -> Any:
    """A property of the field `name` of a record: what the record or the nearest base declares at
    the field; else the class attribute ``KEY`` of the record that declares it."""
    owners = [owner for owner in kind.__mro__ if name in get_annotations(owner)]
    for owner in owners:
        declared = owner.__dict__.get("__dataclass_fields__", {}).get(name)
        if declared is not None and key in declared.metadata:
            return declared.metadata[key]
    return owners[-1].__dict__.get(key.upper(), default)


def names_with(kind: type, key: str, value: Any = True) -> list[str]:
    """Names of the fields with this value of a property."""
    return [item.name for item in fields(kind) if property_of(kind, item.name, key) == value]


def value_before(kind: type, item: Field[Any]) -> Any:
    """Value of a field in a run that was written before the field existed; MISSING if it has
    neither that nor a default."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return property_of(kind, item.name, "before", default)


def replacement_of(kind: type, name: str, value: Any) -> str | None:
    """Name to choose in place of one that a setting had in earlier versions; None for others."""
    removed = property_of(kind, name, "removed", {})
    return removed.get(value) if isinstance(value, str) else None
