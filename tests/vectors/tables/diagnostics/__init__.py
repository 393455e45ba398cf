"""Rows of jrl/losses/diagnostics."""

from vectors.tables.diagnostics import credit, position, statistics

ROWS = [
    *position.ROWS,
    *credit.ROWS,
    *statistics.ROWS,
]
