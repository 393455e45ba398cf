"""A training step is compiled for eight absent TPUs, and fits them."""

from compilers import compiled_step, needs_compiler


@needs_compiler("tpu")
def test_a_step_on_eight_tpus_is_compiled(tmp_path):
    compiled_step("v5p", tmp_path)
