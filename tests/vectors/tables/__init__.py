"""A row for each objective, from which its vectors, the rules for arrays and more are taken."""

from vectors.tables import (
    advantages,
    diagnostics,
    distillation,
    divergence,
    mismatch,
    policy,
    reduction,
    rewards,
    value,
)

ROWS = [
    *reduction.ROWS,
    *advantages.ROWS,
    *policy.ROWS,
    *value.ROWS,
    *divergence.ROWS,
    *distillation.ROWS,
    *rewards.ROWS,
    *mismatch.ROWS,
    *diagnostics.ROWS,
]
# By the name under which `jrl` has them.
OBJECTIVES = {row.function: row for row in ROWS}
