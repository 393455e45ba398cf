"""The published vectors: worked out again by the oracles, and met by the library."""

import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vectors.tables import VECTORS
from vectors.vector import FOLDER, plain

import jrl

# Six digits more than float32 has, and room for sums and exponentials in float64 to differ.
TOLERANCE = {"float64": (1e-10, 1e-13), "float32": (1e-4, 1e-6)}
FILES = sorted(FOLDER.glob("*.json"))


def cases():
    for file in FILES:
        document = json.loads(file.read_text())
        for case in document["cases"]:
            yield pytest.param(document, case, id=f"{file.stem}: {case['name']}")


def array(values, dtype):
    """The array of a file, with NaN for what is under the mask."""
    x = np.array(values, dtype=object)
    if all(isinstance(v, int | bool) for v in x.flat):
        return jnp.asarray(x.astype(bool if isinstance(x.flat[0], bool) else np.int32))
    return jnp.asarray(np.where(x == None, np.nan, x).astype(float), dtype)  # noqa: E711 - elementwise


def settings(parameters, dtype):
    """Parameters as keywords: lists are arrays, "inf" is infinite, the rest is itself."""

    def one(value):
        if isinstance(value, list):
            return array(value, dtype)
        return float(value) if value in ("inf", "-inf") else value

    # Edges of buckets decide the shape of the result: they are numbers, not an array.
    return {n: tuple(v) if n == "edges" else one(v) for n, v in parameters.items()}


def public(name):
    """The function behind a public name, which may be that of a package's."""
    return functools.reduce(getattr, name.split("."), jrl)


def results_of(returned, names):
    """What a function returns under the names of the file, from a tuple, a record or a mapping."""
    if isinstance(returned, jax.Array):
        returned = [returned]
    elif not isinstance(returned, tuple | dict):
        returned = [getattr(returned, name) for name in names]
    if isinstance(returned, dict):
        returned = [returned[name] for name in names]
    numbers = [x.value() if hasattr(x, "value") else x for x in returned]
    return dict(zip(names, numbers, strict=True))


def outcome(document, case, dtype):
    """What the library returns, under the names of the file, and the gradients it lists."""
    function = public(document["function"])
    arguments = {name: array(values, dtype) for name, values in case["inputs"].items()}
    keywords = settings(case["parameters"], dtype)
    wanted = case.get("gradients", {})

    def first(differentiable):
        result = function(*{**arguments, **differentiable}.values(), **keywords)
        result = results_of(result, document["outputs"])
        return jnp.sum(result[document["outputs"][0]]), result

    if wanted:
        slopes, results = jax.grad(first, has_aux=True)({name: arguments[name] for name in wanted})
    else:
        slopes, (_, results) = {}, first({})
    if "metrics" in results:
        results["metrics"] = {name: m.value() for name, m in results["metrics"].items()}
    return {**results, "gradients": slopes} if wanted else results


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


@pytest.mark.parametrize(("document", "case"), list(cases()))
def test_the_library_meets_the_vectors(document, case):
    meet(document, case, "float64")


# What single precision can get wrong is the same in every sixth case.
@pytest.mark.parametrize(("document", "case"), list(cases())[::6])
def test_the_library_meets_the_vectors_in_single_precision(document, case):
    meet(document, case, "float32")


def meet(document, case, dtype):
    with jax.enable_x64(dtype == "float64"):
        actual = outcome(document, case, dtype)
    expected = {name: case[name] for name in (*document["outputs"], "gradients") if name in case}
    compare(actual, expected, *TOLERANCE[dtype], document["function"])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.function)
def test_the_files_hold_what_the_oracles_say(vector):
    # Not to the last bit: libraries of elementary functions differ between machines.
    written = json.loads(vector.path.read_text())
    for case, now in zip(written["cases"], plain(vector.document())["cases"], strict=True):
        assert case["inputs"] == json.loads(json.dumps(now["inputs"]))
        assert case["parameters"] == json.loads(json.dumps(now["parameters"]))
        compare_numbers(case, now)


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


def test_each_file_belongs_to_a_table_and_each_name_is_public():
    assert {file.stem for file in FILES} == {vector.function for vector in VECTORS}
    assert len({vector.function for vector in VECTORS}) == len(VECTORS)
    functions = {name for name in jrl.__all__ if inspect.isfunction(getattr(jrl, name))}
    functions |= {
        f"diagnostics.{name}"
        for name in jrl.diagnostics.__all__
        if inspect.isfunction(getattr(jrl.diagnostics, name))
    }
    # A table of settings computes nothing.
    assert {vector.function for vector in VECTORS} == functions - {"conventions"}
