"""Every kernel becomes machine code for the accelerator that it is for, at one real shape, and
attention at its widest heads too."""

import pytest
from compilers import compiled, needs_compiler

from benchmarks.absent.descriptions import SHARED_MEMORY_OF_BLOCK, TPUS
from benchmarks.absent.kernel_cases import gpu_cases, tpu_cases
from benchmarks.absent.shapes import FIRST, QUICK

NAMES = {
    "gate/up product": {"grouped_product"},
    "down product": {"grouped_product"},
    "transposed product": {"grouped_product"},
    "product, rows gathered": {"grouped_product"},
    "product, rows scattered": {"grouped_product"},
    "weight gradient": {"grouped_sum"},
    "weight gradient, left gathered": {"grouped_sum"},
    "weight gradient, right gathered": {"grouped_sum"},
    "SwiGLU": {"swiglu_forward"},
    "SwiGLU, rows gathered": {"swiglu_forward"},
    "SwiGLU gradient": {"swiglu_backward"},
    "SwiGLU gradient, rows gathered": {"swiglu_backward"},
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


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    # The largest tiles; all products are compiled by `python -m benchmarks.absent`.
    folder = tmp_path_factory.mktemp("megablox")
    return compiled("megablox", folder, "--only", "gate/up weight gradient", "gate/up product,")


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

    for operation in ("down product", "SwiGLU", "attention", "decode attention"):
        assert instructions(operation)["HGMMA"] > 0
    # Rows by the copy engine, or gathered by asynchronous copies of threads.
    assert instructions("down product")["LDGSTS"] == 0 < instructions("down product")["UTMALDG"]
    assert instructions("product, rows gathered")["LDGSTS"] > 0


@needs_compiler("tpu")
@pytest.mark.parametrize("kind", TPUS)
def test_megablox_fits_each_generation(kind, products):
    rows = [row for row in products if row["device"] == kind]
    assert {row["operation"] for row in rows} <= {case.operation for case in tpu_cases(FIRST)}
    assert len(rows) == 2 and not [row["error"] for row in rows if "error" in row]
