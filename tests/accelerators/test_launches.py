"""A step is few launches by whatever None selects, counted in programs for absent H100s."""

import pytest
from compilers import compiled, needs_compiler

from benchmarks.absent.launches import BOUND, CASES

QUICK = "experts layer, None", "decoding, 2 layers of Qwen3-0.6B, 256 rows"
BOUNDED = [
    # The others have more layers, or more of the same.
    pytest.param(case, marks=() if str(case) in QUICK else pytest.mark.slow, id=str(case))
    for case in CASES
    if case.bound is not None
]


@needs_compiler("cuda")
@pytest.mark.parametrize("case", BOUNDED)
def test_a_program_has_few_launches(case, tmp_path):
    """Groups that are not balanced need further turns of loops: few of each. A decode step is a
    turn of the loop of its window."""
    (row,) = compiled("launches", tmp_path, "--only", str(case))
    assert "error" not in row, row["error"]
    assert 0 < row["launches"] < case.bound <= BOUND
    assert row["per_turn"] <= (case.turn or case.bound / 5)
    if case.turn is not None:
        # No part of the cache is copied, and no weights: logits and partial results remain.
        assert row["temporaries"] < 2**31
