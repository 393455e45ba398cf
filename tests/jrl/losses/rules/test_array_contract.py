"""Rules of arrays for every objective: masks, poison, padding, holes, dtypes, jit and vmap.

The calls are listed with the objectives in `tests/vectors/tables`. A call is compiled twice: with
the batches of most promises (the scenarios) stacked on a leading axis, and with all arrays of other
shapes and dtypes; here each promise is looked up in the outcomes. The quick tier asks one call of
each kind.
"""

import functools
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, TIME, batch
from compiling import UNOPTIMISED
from contract_calls import (
    EVERYTHING,
    FACTS,
    LOSSES,
    PER_TOKEN,
    SCALAR,
    WITH_BOTH,
    each,
)
from scenarios import (
    MIXED,
    POISONS,
    SEEDS,
    compress,
    converted,
    order_of_rows,
    padded,
    plain_scenarios,
    scenarios,
    stack,
)
from tiers import full_but

import jrl


def part(which, name):
    """The call, or of a call with two results the one wanted."""
    call = EVERYTHING[name]
    return (lambda b: call(b)[which]) if name in WITH_BOTH else call


DIFFERENTIABLE = ("per_token", "logprobs", "values", "logits")
CONSTANTS = ("old_logprobs", "reference_logprobs", "advantages", "importance_weights", "old_values")
CONSTANTS += ("returns", "rewards", "gamma", "lam")
# Every call with one other dtype of mask, every dtype with a fourth of the calls.
MASK_DTYPES = (jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16)
# By token, and a loss.
ONE_OF_EACH = ("gae", "ppo_loss")


def of_each_kind(calls):
    """One call of each kind is quick: all have vectors there (`test_vectors.py`)."""
    # The scope puts the tests of a call next to each other, so that one process compiles it.
    quick = [name for name in calls if name in ONE_OF_EACH]
    return pytest.mark.parametrize("name", full_but(calls, *quick), scope="module")


everything = of_each_kind(EVERYTHING)


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


def split(tree, names):
    """Entries of a stacked tree by name."""
    return {one: jax.tree.map(lambda x, n=n: x[n], tree) for n, one in enumerate(names)}


@functools.cache
def stacked(name):
    """Results and gradients of `scenarios`, by name, from one program."""
    program = jax.jit(jax.vmap(values_and_slopes(EVERYTHING[name])), compiler_options=UNOPTIMISED)
    return split(jax.device_get(program(stack([*scenarios().values()]))), scenarios())


@dataclass(frozen=True)
class Outcome:
    """Results of a call on other shapes and dtypes.

    Attributes:
      padded: results and gradients of `SEEDS` with padding.
      plain: results of `plain_scenarios`, by name.
      other: results of arrays of other shapes and dtypes, by what is other about them.
    """

    padded: dict[int, tuple[Any, dict[str, np.ndarray]]]
    plain: dict[str, Any]
    other: dict[str, Any]


@functools.cache
def outcome(name) -> Outcome:
    """All other shapes and dtypes, from one program."""
    call = EVERYTHING[name]
    mapped = jax.vmap(values_and_slopes(call))
    row = {n: array[1] for n, array in batch(6).items()}
    mask_dtype = MASK_DTYPES[list(EVERYTHING).index(name) % len(MASK_DTYPES)]
    trials = {
        "padding": (mapped, stack([padded(batch(seed)) for seed in SEEDS])),
        "as it is": (
            lambda b: jax.lax.map(call, b),
            stack([*plain_scenarios().values()]),
        ),
        f"mask of {jnp.dtype(mask_dtype)}": (call, converted(batch(1), mask_dtype, ["mask"])),
        "half precision": (call, batch(9, dtype=jnp.bfloat16)),
        "mixed precision": (call, converted(batch(10), jnp.bfloat16, MIXED)),
        # Not among the cases of `lax.map`: equal bits need equal calls.
        "own mask": (call, batch(1)),
        "mixed precision, raised": (
            call,
            converted(converted(batch(10), jnp.bfloat16, MIXED), np.float32, MIXED),
        ),
        "an extra leading axis": (call, stack([batch(8)])),
    }
    if name in PER_TOKEN | LOSSES:
        rows = part("per token", name)
        trials["rows by vmap"] = jax.vmap(rows), batch(5)
        trials["rows one by one"] = lambda b: jax.lax.map(rows, b), batch(5)
    if name in SCALAR | WITH_BOTH:
        reduced = part("reduced", name)
        trials["a row"] = reduced, row
        trials["a batch of one row"] = reduced, {n: array[None] for n, array in row.items()}

    def run(batches):
        return {trial: _traced(trial, trials[trial][0], b) for trial, b in batches.items()}

    program = jax.jit(run, compiler_options=UNOPTIMISED)
    result = jax.device_get(program({trial: b for trial, (_, b) in trials.items()}))

    return Outcome(
        split(result.pop("padding"), SEEDS),
        split(result.pop("as it is"), plain_scenarios()),
        {trial.split(" of ")[0] if "mask" in trial else trial: x for trial, x in result.items()},
    )


def _traced(trial, function, b):
    try:
        return function(b)
    except Exception as error:
        error.add_note(f"in the trial: {trial}")
        raise


def assert_same(actual, expected, scenario, tolerance=1e-6):
    """Equal trees. The default allows float32 to round sums in another order."""
    near = {"rtol": tolerance, "atol": tolerance}
    chex.assert_trees_all_close(actual, expected, **near, custom_message=scenario)


def differentiable(pair):
    """Results and the gradients by what is to be learned."""
    result, slopes = pair
    return {"result": result, "gradient by": {name: slopes[name] for name in DIFFERENTIABLE}}


@everything
@pytest.mark.parametrize("poison", POISONS)
def test_masked_values_reach_no_result_or_gradient(name, poison):
    result = differentiable(stacked(name)[poison])
    assert_same(result, differentiable(stacked(name)["zeros"]), poison, tolerance=0)
    for array, slope in result["gradient by"].items():
        hidden = ~(MASK[..., None] if slope.ndim > MASK.ndim else MASK)
        assert not np.any(np.where(hidden, slope, 0)), f"a gradient by {array} under the mask"


@everything
def test_unmasked_nan_reaches_the_result(name):
    result, _ = stacked(name)["a NaN that counts"]
    for one in each(result) if name in WITH_BOTH else [result]:
        assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(one))


@pytest.mark.slow
@of_each_kind(EVERYTHING)
def test_masks_of_any_dtype(name):
    result = outcome(name)
    assert_same(result.other["mask"], result.other["own mask"], "another mask", tolerance=0)


@everything
def test_batch_without_tokens_is_zero(name):
    for path, leaf in jax.tree.leaves_with_path(differentiable(stacked(name)["no token"])):
        assert not np.any(leaf), jax.tree_util.keystr(path)


@everything
def test_one_token_per_row_is_finite(name):
    pair = differentiable(stacked(name)["one token per row"])
    chex.assert_tree_all_finite(pair)


@of_each_kind(EVERYTHING)
@pytest.mark.slow
def test_padding_adds_nothing(name):
    def cut(full):
        if full.ndim < 2:
            return full
        assert not np.any(full[BATCH:]) and not np.any(full[:, :2])
        return full[:BATCH, 2 : 2 + TIME]

    result = outcome(name)
    for seed in SEEDS:
        actual = jax.tree.map(cut, differentiable(result.padded[seed]))
        assert_same(actual, differentiable(stacked(name)[f"seed {seed}"]), f"seed {seed}")


@everything
def test_row_order_is_followed(name):
    for seed in SEEDS:
        order = order_of_rows(seed)
        expected = jax.tree.map(
            lambda x, order=order: x[order] if x.ndim >= 2 else x,
            differentiable(stacked(name)[f"seed {seed}"]),
        )
        actual = differentiable(stacked(name)[f"seed {seed}, other order"])
        assert_same(actual, expected, f"seed {seed}", tolerance=2e-6)


@everything
def test_holes_equal_the_compressed_sequence(name):
    for seed in SEEDS:
        b = batch(seed)
        expected = jax.tree.map(
            lambda x, b=b: compress(x, b), differentiable(stacked(name)[f"seed {seed}"])
        )
        actual = differentiable(stacked(name)[f"seed {seed}, compressed"])
        assert_same(actual, expected, f"seed {seed}", tolerance=2e-6)


# Without it, each operation is compiled by itself: one call in the quick tier.
@pytest.mark.parametrize("name", full_but(EVERYTHING, "ppo_loss"), scope="module")
def test_jit_equals_eager(name):
    result, _ = stacked(name)["seed 4"]
    assert_same(result, EVERYTHING[name](batch(4)), "seed 4", tolerance=2e-6)


@pytest.mark.slow
@of_each_kind(PER_TOKEN | LOSSES)
def test_vmap_and_a_single_row_equal_the_batch(name):
    actual, expected = outcome(name).other, outcome(name).plain["seed 5"]
    if name in WITH_BOTH:
        expected = expected["per token"]
    assert_same(actual["rows by vmap"], expected, "rows by vmap")
    assert_same(actual["rows one by one"], expected, "rows one by one")


@of_each_kind(SCALAR | WITH_BOTH)
def test_vmap_over_batches_and_a_single_row(name):
    result = outcome(name)
    for seed in ("seed 6", "seed 7"):
        assert_same(stacked(name)[seed][0], result.plain[seed], seed)
    assert_same(result.other["a row"], result.other["a batch of one row"], "a row")


@of_each_kind(EVERYTHING)
def test_extra_leading_axes(name):
    actual = outcome(name)
    expected = jax.tree.map(lambda x: x[None] if x.ndim >= 2 else x, actual.plain["seed 8"])
    assert_same(actual.other["an extra leading axis"], expected, "an extra leading axis")


@of_each_kind(EVERYTHING)
def test_half_precision_computes_in_float32(name):
    actual = outcome(name)
    result = actual.other["half precision"]
    expected = actual.plain["half precision, raised"]
    assert_same(result, expected, "half precision", tolerance=0)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(result)}


@of_each_kind(EVERYTHING)
def test_mixed_precision_needs_no_cast(name):
    actual = outcome(name)
    expected = actual.other["mixed precision, raised"]
    assert_same(actual.other["mixed precision"], expected, "mixed precision", tolerance=0)


@everything
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(jax.eval_shape(EVERYTHING[name], batch(11, dtype=np.float64)))
    assert jnp.float32 not in {leaf.dtype for leaf in leaves}


@everything
def test_only_current_quantities_carry_gradients(name):
    constants = CONSTANTS + (("values", "logprobs") if name in FACTS else ())
    _, slopes = stacked(name)["seed 12"]
    assert not [constant for constant in constants if np.any(slopes[constant])]


def test_debug_nans_passes_masked_infinities():
    b = {x: np.where(MASK, y, -np.inf) if y.shape == MASK.shape else y for x, y in batch(0).items()}
    policies, mask = (b["logprobs"], b["old_logprobs"]), MASK
    with jax.debug_nans(True):
        jrl.kl_estimate(*policies, mask)
        jrl.dppo_loss(*policies, b["advantages"], mask, kind="kl", max_divergence=0.2)
        jrl.top_entropy_mask(b["entropy"], mask)
        jrl.value_loss(b["values"], b["old_values"], b["returns"], mask, clip=0.2)
