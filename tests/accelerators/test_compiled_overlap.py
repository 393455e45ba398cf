"""Communication of a training step on eight absent GPUs overlaps with the flags for it."""

from compilers import compiled, needs_compiler

from benchmarks.absent.report import hidden_share


@needs_compiler("cuda")
def test_collectives_have_work_beside_them(tmp_path):
    (row,) = compiled("schedule", tmp_path, "--only", "h100 Qwen3-30B-A3B, 4 layers dp8 / ep8 all")
    assert "error" not in row, row["error"]
    assert 0 < row["asynchronous"] <= row["collectives"]
    assert hidden_share(row, "_of_layers") > 0.5
