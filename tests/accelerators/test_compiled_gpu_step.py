"""A training step is compiled for eight absent GPUs, with every kernel, and fits them."""

from compilers import compiled_step, needs_compiler


@needs_compiler("cuda")
def test_a_step_on_eight_gpus_is_compiled_with_its_kernels(tmp_path):
    step = compiled_step("h100", tmp_path)
    names = set(step["kernels"])
    assert names >= {"route", "grouped_product", "attention_forward"}
    assert names >= {"grouped_sum", "attention_grad_key_value"}
    assert step["defects"] == []
    # Other work may run beside its communication.
    assert 0 < step["asynchronous"] <= step["collectives"]
