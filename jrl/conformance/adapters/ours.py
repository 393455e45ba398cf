"""The functions of jrl, under the names of the cases."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import jrl

from ..cases import NAMED, quantities


def functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    for name in quantities():
        if name not in NAMED:
            yield name, name, reduce(getattr, name.split("."), jrl)
