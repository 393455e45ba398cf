"""Marks of cases that run in the full tier alone (CONTRIBUTING.md describes the tiers)."""

from collections.abc import Iterable
from typing import Any

import pytest


def full_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: `cases`, of which all but `quick` are marked as slow."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    if unknown:
        raise ValueError(f"{unknown} are to be quick, and are not among the cases {cases}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
