"""The defaults, one by one: those of the papers, and of the libraries where a paper has none.

A default is part of what a function computes, and a changed one changes curves without an error.
"""

import inspect

import pytest
from contract_calls import public
from vectors.tables import ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.function)
def test_defaults(row):
    parameters = inspect.signature(public(row.function)).parameters.values()
    given = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    assert given == row.defaults
