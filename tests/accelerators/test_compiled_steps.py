"""A training step is compiled for eight absent accelerators, and fits them."""

import pytest
from compilers import compiled, needs_compiler

from benchmarks.absent.descriptions import GPUS, TPUS


def step(tmp_path, kind):
    (row,) = compiled("steps", tmp_path, "--only", kind)
    assert "error" not in row, row["error"]
    memory = (GPUS | TPUS)[kind].memory
    assert 0 < row["arguments"] + row["temporaries"] < 0.9 * memory
    return row


@needs_compiler("cuda")
def test_a_step_on_eight_gpus_is_compiled_with_its_kernels(tmp_path):
    names = {name for name in step(tmp_path, "h100")["kernels"]}
    assert names >= {"route", "grouped_product", "swiglu_forward", "attention_forward"}
    assert names >= {"grouped_sum", "swiglu_backward", "attention_grad_key_value"}


@needs_compiler("tpu")
@pytest.mark.parametrize("kind", ["v5e"])
def test_a_step_on_eight_tpus_is_compiled(kind, tmp_path):
    step(tmp_path, kind)
