"""What every objective promises about arrays: masks, poison, padding, holes, dtypes, jit and vmap.

The calls are listed with the objectives in `tests/vectors/tables`. A call is compiled once, with
the batches of all promises (the scenarios) stacked on a leading axis; here each promise is looked
up in the outcome.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, TIME, batch, numpy_batch
from compiling import UNOPTIMISED
from contract_calls import (
    EVERYTHING,
    FACTS,
    LOSSES,
    PER_TOKEN,
    SCALAR,
    WITH_BOTH,
    but_diagnostics,
    each,
)

import jrl


def part(which, name):
    """The call, or of a call with two results the one wanted."""
    call = EVERYTHING[name]
    return (lambda b: call(b)[which]) if name in WITH_BOTH else call


DIFFERENTIABLE = ("per_token", "logprobs", "values", "logits")
CONSTANTS = ("old_logprobs", "ref_logprobs", "advantages", "importance_weights", "old_values")
CONSTANTS += ("returns", "rewards", "gamma", "lam")
PER_ROW = ("correct", "scores", "groups")
ALIGNED = [name for name in numpy_batch(0) if name not in (*PER_ROW, "mask")]
POISONS = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "1e30": 1e30}
SEEDS = range(20, 25)
# What is in half precision where the rest is in single.
MIXED = ("logprobs", "values", "advantages")
# Every call with one other dtype of mask, every dtype with a fourth of the calls.
MASK_DTYPES = (jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16)
# The scope puts the tests of a call next to each other, so that one process compiles it.
everything = pytest.mark.parametrize("name", but_diagnostics(EVERYTHING), scope="module")


def plain(seed, mask=MASK, dtype=np.float32):
    """The batch of `batches.py`, in arrays that no device has seen."""
    return {
        name: array.astype(dtype) if array.dtype == np.float64 else array
        for name, array in numpy_batch(seed, mask).items()
    }


def converted(b, dtype, names):
    return b | {name: b[name].astype(dtype) for name in names}


def under_mask(b, value):
    """The batch with `value` wherever the mask is false."""
    poisoned = dict(b)
    for name in ALIGNED:
        mask = b["mask"][..., None] if b[name].ndim > b["mask"].ndim else b["mask"]
        poisoned[name] = np.where(mask, b[name], np.asarray(value, b[name].dtype))
    return poisoned


def with_a_nan_that_counts(b):
    broken = {name: b[name].copy() for name in ALIGNED}
    for array in broken.values():
        array[1, 4] = np.nan
    return b | broken | {"correct": np.ones_like(b["correct"])}


def order_of_rows(seed):
    return np.random.default_rng(seed).permutation(BATCH)


def compress(array, b):
    """True tokens first, in their order; what was between them goes to the end."""
    if array.ndim < 2:
        return array
    order = np.argsort(~b["mask"], axis=1, stable=True)
    index = order[..., None] if array.ndim > 2 else order
    return np.take_along_axis(array, index, axis=1)


def padded(b):
    """Two more positions before, one behind and one more row, all under the mask."""

    def pad(array):
        width = [(0, 1), (2, 1), (0, 0)][: array.ndim]
        return np.pad(array, width, constant_values=array.dtype != bool)

    wider = {name: pad(array) for name, array in b.items()}
    wider["groups"][BATCH:] = 99
    return wider


@functools.cache
def scenarios():
    """Batches of one shape and dtype by name, of each of which values and gradients are taken."""
    clean = plain(0)
    found = {"zeros": under_mask(clean, 0.0)}
    found |= {poison: under_mask(clean, value) for poison, value in POISONS.items()}
    found["a NaN that counts"] = with_a_nan_that_counts(clean)
    found["no token"] = plain(2, np.zeros((BATCH, TIME), bool))
    found["one token per row"] = plain(3, np.eye(BATCH, TIME, dtype=bool))
    found |= {f"seed {seed}": plain(seed) for seed in (4, 6, 7, 12, *SEEDS)}
    for seed in SEEDS:
        b, order = plain(seed), order_of_rows(seed)
        found[f"seed {seed}, other order"] = {n: array[order] for n, array in b.items()}
        found[f"seed {seed}, compressed"] = {n: compress(array, b) for n, array in b.items()}
        assert not np.any(np.diff(found[f"seed {seed}, compressed"]["mask"].astype(int)) > 0)
    return found


@functools.cache
def plain_scenarios():
    """Batches on which a call is run as it is, without vmap: others are compared with these."""
    half, mixed = plain(9, dtype=jnp.bfloat16), converted(plain(10), jnp.bfloat16, MIXED)
    floats = [name for name, array in half.items() if array.dtype == jnp.bfloat16]
    return {
        "half precision, raised": converted(half, np.float32, floats),
        "mixed precision, raised": converted(mixed, np.float32, MIXED),
        **{f"seed {seed}": plain(seed) for seed in (1, 5, 6, 7, 8)},
    }


def stack(batches):
    return {name: np.stack([b[name] for b in batches]) for name in batches[0]}


def values_and_slopes(call):
    """Results, and the gradients of their sum by every array that may carry one."""

    def both(b):
        def total(arrays):
            result = call({**b, **arrays})
            leaves = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(map(jnp.sum, leaves)), result

        arrays = {name: b[name] for name in (*DIFFERENTIABLE, *CONSTANTS)}
        slopes, result = jax.grad(total, has_aux=True)(arrays)
        return result, slopes

    return both


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes:
      stacked: results and gradients of `scenarios`, by name.
      padded: those of `SEEDS` with padding.
      plain: results of `plain_scenarios`, by name.
      other: results of arrays of other shapes and dtypes, by what is other about them.
    """

    stacked: dict[str, tuple[Any, dict[str, np.ndarray]]]
    padded: dict[int, tuple[Any, dict[str, np.ndarray]]]
    plain: dict[str, Any]
    other: dict[str, Any]


@functools.cache
def outcome(name) -> Outcome:
    """Everything that is compared of a call, from one program."""
    call = EVERYTHING[name]
    mapped = jax.vmap(values_and_slopes(call))
    row = {n: array[1] for n, array in plain(6).items()}
    mask_dtype = MASK_DTYPES[list(EVERYTHING).index(name) % len(MASK_DTYPES)]
    trials = {
        "values and gradients": (mapped, stack([*scenarios().values()])),
        "padding": (mapped, stack([padded(plain(seed)) for seed in SEEDS])),
        "as it is": (
            lambda b: jax.lax.map(call, b),
            stack([*plain_scenarios().values()]),
        ),
        f"mask of {jnp.dtype(mask_dtype)}": (call, converted(plain(1), mask_dtype, ["mask"])),
        "half precision": (call, plain(9, dtype=jnp.bfloat16)),
        "mixed precision": (call, converted(plain(10), jnp.bfloat16, MIXED)),
        # Not among those of `lax.map`: what must be equal to the bit is called in the same way.
        "own mask": (call, plain(1)),
        "mixed precision, raised": (
            call,
            converted(converted(plain(10), jnp.bfloat16, MIXED), np.float32, MIXED),
        ),
        "an extra leading axis": (call, stack([plain(8)])),
    }
    if name in PER_TOKEN | LOSSES:
        rows = part("per token", name)
        trials["rows by vmap"] = jax.vmap(rows), plain(5)
        trials["rows one by one"] = lambda b: jax.lax.map(rows, b), plain(5)
    if name in SCALAR | WITH_BOTH:
        reduced = part("reduced", name)
        trials["a row"] = reduced, row
        trials["a batch of one row"] = reduced, {n: array[None] for n, array in row.items()}

    def run(batches):
        return {trial: _traced(trial, trials[trial][0], b) for trial, b in batches.items()}

    program = jax.jit(run, compiler_options=UNOPTIMISED)
    found = jax.device_get(program({trial: b for trial, (_, b) in trials.items()}))

    def split(trial, names):
        tree = found.pop(trial)
        return {one: jax.tree.map(lambda x, n=n: x[n], tree) for n, one in enumerate(names)}

    return Outcome(
        split("values and gradients", scenarios()),
        split("padding", SEEDS),
        split("as it is", plain_scenarios()),
        {trial.split(" of ")[0] if "mask" in trial else trial: x for trial, x in found.items()},
    )


def _traced(trial, function, b):
    try:
        return function(b)
    except Exception as error:
        error.add_note(f"in the trial: {trial}")
        raise


def assert_same(actual, expected, scenario, tolerance=1e-6):
    """Equal trees. The default allows float32 to round sums in another order."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), scenario
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, leaf), wanted in pairs:
        np.testing.assert_allclose(
            np.asarray(leaf, np.float64) if leaf.dtype == jnp.bfloat16 else leaf,
            wanted,
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"{scenario}: {jax.tree_util.keystr(path)}",
        )


def differentiable(pair):
    """Results and the gradients by what is to be learned."""
    result, slopes = pair
    return {"result": result, "gradient by": {name: slopes[name] for name in DIFFERENTIABLE}}


@everything
@pytest.mark.parametrize("poison", POISONS)
def test_nothing_under_a_false_mask_reaches_values_or_gradients(name, poison):
    stacked = outcome(name).stacked
    found = differentiable(stacked[poison])
    assert_same(found, differentiable(stacked["zeros"]), poison, tolerance=0)
    for array, slope in found["gradient by"].items():
        hidden = ~(MASK[..., None] if slope.ndim > MASK.ndim else MASK)
        assert not np.any(np.where(hidden, slope, 0)), f"a gradient by {array} under the mask"


@everything
def test_a_nan_that_counts_is_not_hidden(name):
    result, _ = outcome(name).stacked["a NaN that counts"]
    for one in each(result) if name in WITH_BOTH else [result]:
        assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(one))


@everything
def test_masks_of_any_dtype(name):
    found = outcome(name)
    assert_same(found.other["mask"], found.other["own mask"], "another mask", tolerance=0)


@everything
def test_a_batch_without_tokens_gives_zero_and_no_gradient(name):
    for path, leaf in jax.tree.leaves_with_path(differentiable(outcome(name).stacked["no token"])):
        assert not np.any(leaf), jax.tree_util.keystr(path)


@everything
def test_one_token_per_row_is_finite(name):
    pair = differentiable(outcome(name).stacked["one token per row"])
    for path, leaf in jax.tree.leaves_with_path(pair):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)


@everything
def test_padding_adds_nothing(name):
    def cut(full):
        if full.ndim < 2:
            return full
        assert not np.any(full[BATCH:]) and not np.any(full[:, :2])
        return full[:BATCH, 2 : 2 + TIME]

    found = outcome(name)
    for seed in SEEDS:
        actual = jax.tree.map(cut, differentiable(found.padded[seed]))
        assert_same(actual, differentiable(found.stacked[f"seed {seed}"]), f"seed {seed}")


@everything
def test_the_order_of_rows_does_not_matter(name):
    stacked = outcome(name).stacked
    for seed in SEEDS:
        order = order_of_rows(seed)
        expected = jax.tree.map(
            lambda x, order=order: x[order] if x.ndim >= 2 else x,
            differentiable(stacked[f"seed {seed}"]),
        )
        actual = differentiable(stacked[f"seed {seed}, other order"])
        assert_same(actual, expected, f"seed {seed}", tolerance=2e-6)


@everything
def test_holes_equal_the_compressed_sequence(name):
    stacked = outcome(name).stacked
    for seed in SEEDS:
        b = plain(seed)
        expected = jax.tree.map(
            lambda x, b=b: compress(x, b), differentiable(stacked[f"seed {seed}"])
        )
        actual = differentiable(stacked[f"seed {seed}, compressed"])
        assert_same(actual, expected, f"seed {seed}", tolerance=2e-6)


@everything
def test_jit(name):
    result, _ = outcome(name).stacked["seed 4"]
    assert_same(result, EVERYTHING[name](batch(4)), "seed 4", tolerance=2e-6)


@pytest.mark.parametrize("name", PER_TOKEN | LOSSES, scope="module")
def test_vmap_and_a_single_row_equal_the_batch(name):
    found, expected = outcome(name).other, outcome(name).plain["seed 5"]
    if name in WITH_BOTH:
        expected = expected["per token"]
    assert_same(found["rows by vmap"], expected, "rows by vmap")
    assert_same(found["rows one by one"], expected, "rows one by one")


@pytest.mark.parametrize("name", but_diagnostics(SCALAR | WITH_BOTH), scope="module")
def test_vmap_over_batches_and_a_single_row(name):
    found = outcome(name)
    for seed in ("seed 6", "seed 7"):
        assert_same(found.stacked[seed][0], found.plain[seed], seed)
    assert_same(found.other["a row"], found.other["a batch of one row"], "a row")


@everything
def test_extra_leading_axes(name):
    found = outcome(name)
    expected = jax.tree.map(lambda x: x[None] if x.ndim >= 2 else x, found.plain["seed 8"])
    assert_same(found.other["an extra leading axis"], expected, "an extra leading axis")


@everything
def test_half_precision_is_computed_in_float32(name):
    found = outcome(name)
    result = found.other["half precision"]
    expected = found.plain["half precision, raised"]
    assert_same(result, expected, "half precision", tolerance=0)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(result)}


@everything
def test_mixed_precision_needs_no_cast(name):
    found = outcome(name)
    expected = found.other["mixed precision, raised"]
    assert_same(found.other["mixed precision"], expected, "mixed precision", tolerance=0)


@everything
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(jax.eval_shape(EVERYTHING[name], plain(11, dtype=np.float64)))
    assert jnp.float32 not in {leaf.dtype for leaf in leaves}


@everything
def test_only_current_quantities_carry_gradients(name):
    constants = CONSTANTS + (("values", "logprobs") if name in FACTS else ())
    _, slopes = outcome(name).stacked["seed 12"]
    assert not [constant for constant in constants if np.any(slopes[constant])]


def test_shapes_that_would_broadcast_by_accident_are_refused():
    square = jnp.ones((3, 3))
    row = jnp.ones(3)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\).*advantages\[:, None\]"):
        jrl.ppo_loss(square, square, row, square)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\).*over \(3, 3\).*lam\[:, None\]"):
        jrl.gae(square, square, square, lam=row)
    with pytest.raises(ValueError, match=r"importance_weights has shape \(3,\)"):
        jrl.ppo_loss(square, square, square, square, importance_weights=row)
