"""The published vectors: worked out again by the oracles, and met by the library."""

import functools
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import UNOPTIMISED
from contract_calls import public
from vectors.objective import FOLDER, numbers, plain
from vectors.tables import ROWS

import jrl

# Six digits more than float32 has, and room for sums and exponentials in float64 to differ.
TOLERANCE = {"float64": (1e-10, 1e-13), "float32": (1e-4, 1e-6)}
FILES = sorted(FOLDER.glob("*.json"))


DOCUMENTS = {file.stem: json.loads(file.read_text()) for file in FILES}
CASES = [(name, n) for name, document in DOCUMENTS.items() for n in range(len(document["cases"]))]


def has_a_twin(name, n):
    """True if the same loss is there per token."""
    cases = DOCUMENTS[name]["cases"]
    return f"{cases[n]['name']}, per token" in {case["name"] for case in cases}


def is_another_reduction(name, n):
    """True if the same loss is there with the default reduction; `aggregate` has vectors of its
    own."""
    mode, _, rest = DOCUMENTS[name]["cases"][n]["name"].partition(", ")
    return rest == "importance weights" and mode in REDUCED


def is_reduced(case):
    return has_a_twin(*case) or is_another_reduction(*case)


REDUCED = {"token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}
GENERAL = [case for case in CASES if not is_reduced(case)]


def largest(name):
    """The case of a function with the most numbers and settings."""
    sizes = {
        n: len(json.dumps(DOCUMENTS[name]["cases"][n])) for owner, n in GENERAL if owner == name
    }
    return name, max(sizes, key=sizes.get)


FEW = [largest(name) for name in DOCUMENTS]
TRIED = {
    "float64": FEW,
    "float64, others": [case for case in CASES if case not in FEW],
    # What single precision can get wrong is the same in every sixth case.
    "float32": CASES[::6],
}


def cases(dtype):
    """The cases of a precision, ordered by function: cases of a function are one program."""
    named = [f"{name}: {DOCUMENTS[name]['cases'][n]['name']}" for name, n in TRIED[dtype]]
    return pytest.mark.parametrize(("name", "number"), TRIED[dtype], ids=named)


def array(values, dtype):
    """The array of a file, with NaN for what is under the mask."""
    x = np.array(values, dtype=object)
    if all(isinstance(v, int | bool) for v in x.flat):
        return x.astype(bool if isinstance(x.flat[0], bool) else np.int32)
    return np.where(x == None, np.nan, x).astype(dtype)  # noqa: E711 - elementwise


def settings(parameters, dtype):
    """Parameters as keywords: numbers and words, and apart from them the arrays, which are lists.

    Edges of buckets decide the shape of the result: they are numbers, not an array.
    """
    arrays = {n: array(v, dtype) for n, v in parameters.items() if isinstance(v, list)}
    fixed = {
        n: float(v) if v in ("inf", "-inf") else v for n, v in parameters.items() if n not in arrays
    }
    if "edges" in arrays:
        del arrays["edges"]
        fixed["edges"] = tuple(parameters["edges"])
    return fixed, arrays


def results_of(returned, names):
    """Results of a function by the names of the file, from a tuple, a record or a mapping."""
    if isinstance(returned, jax.Array):
        returned = [returned]
    elif not isinstance(returned, tuple | dict):
        returned = [getattr(returned, name) for name in names]
    if isinstance(returned, dict):
        returned = [returned[name] for name in names]
    numbers = [x.value() if hasattr(x, "value") else x for x in returned]
    return dict(zip(names, numbers, strict=True))


def outcome(document, case, fixed, arguments, arrays):
    """Results of the library by the names of the file, and the gradients that the file lists."""
    function = public(document["function"])
    wanted = case.get("gradients", {})

    def first(differentiable):
        result = function(*{**arguments, **differentiable}.values(), **fixed, **arrays)
        result = results_of(result, document["outputs"])
        return jnp.sum(result[document["outputs"][0]]), result

    if wanted:
        slopes, results = jax.grad(first, has_aux=True)({name: arguments[name] for name in wanted})
    else:
        slopes, (_, results) = {}, first({})
    if "metrics" in results:
        results["metrics"] = {name: m.value() for name, m in results["metrics"].items()}
    return {**results, "gradients": slopes} if wanted else results


@functools.cache
def outcomes(name, tried):
    """The outcome of every case of a function by its number, from one program."""
    document, dtype = DOCUMENTS[name], tried.split(",")[0]
    chosen = {n: document["cases"][n] for owner, n in TRIED[tried] if owner == name}
    parameters = {n: settings(case["parameters"], dtype) for n, case in chosen.items()}

    def run(arrays):
        result = {}
        for n, case in chosen.items():
            # By position, since a mapping does not keep its order on the way into a program.
            inputs = dict(zip(case["inputs"], arrays[n][0], strict=True))
            result[n] = outcome(document, case, parameters[n][0], inputs, arrays[n][1])
        return result

    arguments = {
        n: ([array(x, dtype) for x in case["inputs"].values()], parameters[n][1])
        for n, case in chosen.items()
    }
    with jax.enable_x64(dtype == "float64"):
        return jax.device_get(jax.jit(run, compiler_options=UNOPTIMISED)(arguments))


def compare(actual, expected, rtol, atol, where):
    if isinstance(expected, dict):
        for name in expected:
            compare(actual[name], expected[name], rtol, atol, f"{where} {name}")
    else:
        expected = np.array(expected, dtype=object)
        counts = expected != None  # noqa: E711 - elementwise
        assert np.shape(actual) == expected.shape, where
        np.testing.assert_allclose(
            np.asarray(actual)[counts], expected[counts].astype(float), rtol, atol, err_msg=where
        )


@cases("float64")
def test_library_equals_largest_vectors(name, number):
    meet(name, number, "float64")


@pytest.mark.slow
@cases("float64, others")
def test_library_equals_other_vectors(name, number):
    meet(name, number, "float64, others")


@pytest.mark.slow
@cases("float32")
def test_library_equals_vectors_in_single_precision(name, number):
    meet(name, number, "float32")


def meet(name, number, tried):
    document, case = DOCUMENTS[name], DOCUMENTS[name]["cases"][number]
    expected = {name: case[name] for name in (*document["outputs"], "gradients") if name in case}
    actual = outcomes(name, tried)[number]
    compare(actual, expected, *TOLERANCE[tried.split(",")[0]], document["function"])


@pytest.mark.slow
@pytest.mark.parametrize("vector", ROWS, ids=lambda vector: vector.function)
def test_vector_files_equal_the_oracles(vector):
    """From the inputs of the file, which are read and not made again: NumPy's logarithm has other
    last digits on a processor without AVX-512, and so may every number here that is compared."""
    written = json.loads(vector.path.read_text())
    for case, row in zip(written["cases"], vector.cases, strict=True):
        assert case["name"] == row.name
        compare_numbers(case["inputs"], plain(row.inputs))
        compare_numbers(case["parameters"], plain(row.parameters))
        inputs, parameters = numbers(case["inputs"]), numbers(case["parameters"])
        arguments = {name: case[name] for name in ("name", "inputs", "parameters")}
        compare_numbers(case, {**arguments, **vector.results(inputs, parameters)})


def compare_numbers(written, now):
    assert type(written) is type(now) or {type(written), type(now)} == {int, float}
    if isinstance(written, dict):
        assert written.keys() == now.keys()
        for name in written:
            compare_numbers(written[name], now[name])
    elif isinstance(written, list):
        assert len(written) == len(now)
        for pair in zip(written, now, strict=True):
            compare_numbers(*pair)
    elif isinstance(written, float):
        np.testing.assert_allclose(now, written, rtol=1e-12, atol=1e-15)
    else:
        assert written == now


# Diagnostics are this library's own.
PUBLISHED = [row for row in ROWS if not row.function.startswith("diagnostics.")]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.function)
def test_docstrings_link_the_source_of_vectors(row):
    text = inspect.getdoc(public(row.function)) or ""
    for other in re.findall(r"As for `(\w+)`", text):
        text += inspect.getdoc(public(other)) or ""
    for paper in re.findall(r"arXiv (\d{4}\.\d{5})", row.source):
        assert f"https://arxiv.org/abs/{paper}" in text


def test_vector_files_tables_and_public_names_agree():
    assert {file.stem for file in FILES} == {row.function for row in ROWS}
    assert len({row.function for row in ROWS}) == len(ROWS)
    functions = {name for name in jrl.__all__ if inspect.isfunction(getattr(jrl, name))}
    functions |= {
        f"diagnostics.{name}"
        for name in jrl.diagnostics.__all__
        if inspect.isfunction(getattr(jrl.diagnostics, name))
    }
    # A table of settings computes nothing.
    assert {row.function for row in ROWS} == functions - {"conventions"}
