"""Every kernel becomes machine code for the GPU that it is for, at one real shape, and
attention at its widest heads too."""

import pytest
from compilers import compiled, needs_compiler

from benchmarks.absent.descriptions import SHARED_MEMORY_OF_BLOCK
from benchmarks.absent.kernel_cases import gpu_cases
from benchmarks.absent.shapes import FIRST, QUICK

NAMES = {
    "gate/up product": {"grouped_product"},
    "down product": {"grouped_product"},
    "transposed product": {"grouped_product"},
    "weight gradient": {"grouped_sum"},
    "sorted layout": {"count_assignments", "place_assignments"},
    "permute": {"take_rows"},
    "unpermute": {"combine_rows"},
    "router": {"route"},
    "attention": {"attention_forward"},
    "attention gradient": {"attention_grad_query", "attention_grad_key_value"},
    "decode attention": {"decode_attention"},
    "latent decode attention": {"latent_decode_attention"},
}
"""Names of the kernels in profiles, by operation."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled("kernels", tmp_path_factory.mktemp("kernels"))


def test_every_operation_is_among_the_names():
    operations = {case.operation for case in gpu_cases(FIRST)}
    assert operations == set(NAMES) - {"latent decode attention"}


@needs_compiler("cuda")
@pytest.mark.parametrize("operation", NAMES)
def test_a_kernel_is_compiled_to_machine_code(operation, kernels):
    rows = [row for row in kernels if row["operation"] == operation]
    assert rows and not [row["error"] for row in rows if "error" in row]
    assert {row["kernel"] for row in rows} == NAMES[operation]
    others = {model for model, operations in QUICK.items() if operation in operations}
    assert {row["model"] for row in rows} - {FIRST} == others
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY_OF_BLOCK
        assert row["resident"] >= 1
        # Neither spills nor products that wait for one another, linked and by ptxas alone.
        assert row["spilled"] == row["alone_spilled"] == 0
        assert row["defects"] == []


@needs_compiler("cuda")
def test_products_are_those_of_the_matrix_units(kernels):
    def instructions(operation):
        return next(row for row in kernels if row["operation"] == operation)["instructions"]

    for operation in ("down product", "attention", "decode attention"):
        assert instructions(operation)["HGMMA"] > 0
    # Rows are copied by the copy engine, and not by asynchronous copies of threads.
    assert instructions("down product")["LDGSTS"] == 0 < instructions("down product")["UTMALDG"]
