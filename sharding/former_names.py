"""Deprecated names: a module's attributes under the names they had a release ago."""

import importlib
import warnings
from collections.abc import Callable


def former_names(module: str, **names: str) -> Callable[[str], object]:
    """Returns a module's `__getattr__` (PEP 562) that serves renamed attributes with a warning.

        __getattr__ = former_names(__name__, old_name="new_name")

    Args:
      module: the module's own name.
      **names: for each former name the present one, in this module or, with its path, in another.

    Raises:
      AttributeError: on access, for a name that is not among them.
    """

    def getattr_of_module(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path, _, attribute = names[name].rpartition(".")
        warnings.warn(
            f"{module}.{name} is now {path or module}.{attribute}; the former name goes in the"
            " release after this one",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(path or module), attribute)

    return getattr_of_module
