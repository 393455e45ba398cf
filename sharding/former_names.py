"""Deprecated names: attributes and keywords under the names they had a release ago.

    __getattr__ = former_names(__name__, old_function=new_function)     # at the end of a module

    class Folder:
        __getattr__ = former_members(old_method="new_method")

    @former_keywords(old_argument="new_argument")
    def function(new_argument): ...

Each use of a former name warns with the present one.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def former_names(module: str, **present: Any) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` (PEP 562) for renamed functions and classes.

    Args:
      module: the module's own name.
      **present: for each former name the function or class that it was the name of.

    Raises:
      AttributeError: on access, for a name that is not among them.
    """

    def getattr_of_module(name: str) -> Any:
        if name not in present:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{present[name].__module__}.{present[name].__qualname__}")
        return present[name]

    return getattr_of_module


def former_members(**present: str) -> Callable[[Any, str], Any]:
    """Returns a class's `__getattr__` for renamed attributes and methods.

    Args:
      **present: for each former name the present one.
    """

    def getattr_of_instance(self: Any, name: str) -> Any:
        kind = type(self).__name__
        if name not in present:
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        _warn(f"{kind}.{name}", f"{kind}.{present[name]}")
        return getattr(self, present[name])

    return getattr_of_instance


def former_keywords(
    **present: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Returns a decorator for a function with renamed keyword arguments.

    Args:
      **present: for each former name the present one.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name in present.keys() & kwargs.keys():
                _warn(f"{function.__name__}({name}=)", f"{function.__name__}({present[name]}=)")
                kwargs[present[name]] = kwargs.pop(name)
            return function(*args, **kwargs)

        return call

    return decorate


def _warn(former: str, present: str) -> None:
    warnings.warn(
        f"{former} is now {present}; the former name will be removed in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
