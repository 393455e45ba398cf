"""Rows of jrl/losses/policy."""

from vectors.tables.policy import (
    covariance,
    entropy,
    reinforce,
    selection,
    sequence_ratio,
    token_ratio,
)

ROWS = [
    *token_ratio.ROWS,
    *sequence_ratio.ROWS,
    *reinforce.ROWS,
    *covariance.ROWS,
    *entropy.ROWS,
    *selection.ROWS,
]
