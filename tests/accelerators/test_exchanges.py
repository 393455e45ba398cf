"""Token dispatch between absent servers of H100s sends what the planner says."""

import pytest
from compilers import compiled, needs_compiler
from tiers import full_but


@needs_compiler("cuda")
@pytest.mark.parametrize(
    "method", full_but(["all_to_all", "ragged", "two_level", "two_level_ragged"], "two_level")
)
def test_compiled_layer_sends_the_planned_bytes(method, tmp_path):
    (row,) = compiled("exchanges", tmp_path, "--only", f" {method},")
    assert "error" not in row, row["error"]
    assert row["compiled"] == row["planned"]
    assert row["compiled"]["across"] > 0
