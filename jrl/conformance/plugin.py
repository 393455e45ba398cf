"""A plugin of pytest: another project runs the cases and rules as tests of its own.

In its `conftest.py`: ``pytest_plugins = ["jrl.conformance.plugin"]``; in a test:
``conforms(my_loss, "dapo_loss")``.
"""

from collections.abc import Callable
from typing import Any

import pytest

from .check import check
from .command import Subject, describe


@pytest.fixture
def conforms() -> Callable[..., None]:
    """A check that fails the test with the cases and rules that a function misses."""

    def run(function: Callable[..., Any], quantity: str, framework: str | None = None) -> None:
        report = check(function, quantity, framework)
        if report.verdict not in ("agrees", "agrees to 1e-6", "another convention"):
            pytest.fail(describe(Subject("", "", quantity, function), report), pytrace=False)

    return run
