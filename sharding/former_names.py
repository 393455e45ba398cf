"""Deprecated names: a module's attributes under the names they had a release ago."""

import warnings
from collections.abc import Callable
from typing import Any


def former_names(module: str, **present: Any) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` (PEP 562) that serves renamed attributes with a warning.

        __getattr__ = former_names(__name__, old_name=new_name)

    Args:
      module: the module's own name.
      **present: for each former name the function or class that it was the name of.

    Raises:
      AttributeError: on access, for a name that is not among them.
    """

    def getattr_of_module(name: str) -> Any:
        if name not in present:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = present[name]
        warnings.warn(
            f"{module}.{name} is now {now.__module__}.{now.__qualname__}; the former name will be"
            " removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return now

    return getattr_of_module
