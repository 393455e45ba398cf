"""What every objective promises about arrays: masks, poison, padding, holes, dtypes, jit and vmap.

The calls are listed in the files `calls_*.py`; here each promise is tried on all of them.
"""

import functools

import calls_advantages
import calls_mismatch
import calls_policy
import calls_reduction
import calls_trust_region
import calls_value
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, TIME, batch, numpy_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import jrl

MODULES = (
    calls_reduction,
    calls_advantages,
    calls_policy,
    calls_trust_region,
    calls_value,
    calls_mismatch,
)


def _collect(table: str) -> dict:
    return {name: call for m in MODULES for name, call in getattr(m, table, {}).items()}


# One result per token, of which each row depends on that row alone.
PER_TOKEN = _collect("PER_TOKEN")
# One result per token that depends on the whole batch.
PER_BATCH = _collect("PER_BATCH")
# One result per batch.
SCALAR = _collect("SCALAR")
EVERYTHING = PER_TOKEN | PER_BATCH | SCALAR
DIFFERENTIABLE = ("per_token", "logprobs", "values", "logits")
PER_ROW = ("correct", "scores", "groups")
ALIGNED = [name for name in numpy_batch(0) if name not in (*PER_ROW, "mask")]

everything = pytest.mark.parametrize("call", EVERYTHING.values(), ids=EVERYTHING.keys())
# Programs are compiled once per shape, so drawing the numbers is cheap and drawing shapes is not.
few = settings(max_examples=5, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)


def total(call):
    """The sum of all results, as a function of the arrays that carry gradients."""

    def of(differentiable, b):
        leaves = jax.tree.leaves(call({**b, **differentiable}))
        return sum(jnp.sum(leaf) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))

    return of


@functools.cache
def compiled(call):
    """Values and gradients in one program, compiled once for all the tests of one shape."""

    @jax.jit
    def both(b):
        return call(b), jax.grad(total(call))({name: b[name] for name in DIFFERENTIABLE}, b)

    return both


def gradients(call, b):
    return compiled(call)(b)[1]


def assert_same(actual, expected, tolerance=1e-6):
    """Equal trees. The default allows float32 to round sums in another order."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def under_mask(b, value):
    """The batch with `value` wherever the mask is false."""
    poisoned = dict(b)
    for name in ALIGNED:
        mask = b["mask"].astype(bool)
        mask = mask[..., None] if b[name].ndim > mask.ndim else mask
        poisoned[name] = jnp.where(mask, b[name], jnp.asarray(value, b[name].dtype))
    return poisoned


@everything
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_nothing_under_a_false_mask_reaches_values_or_gradients(call, value):
    b = batch(0)
    clean, poisoned = under_mask(b, 0.0), under_mask(b, value)
    result, slopes = compiled(call)(poisoned)
    assert_same((result, slopes), compiled(call)(clean), tolerance=0)
    for slope in slopes.values():
        hidden = ~(MASK[..., None] if slope.ndim > MASK.ndim else MASK)
        assert not np.any(np.where(hidden, slope, 0))


@everything
def test_a_nan_that_counts_is_not_hidden(call):
    b = batch(0)
    broken = {name: b[name].at[1, 4].set(jnp.nan) for name in ALIGNED} | {
        "mask": b["mask"],
        "correct": jnp.ones_like(b["correct"]),
        "scores": b["scores"],
        "groups": b["groups"],
    }
    leaves = jax.tree.leaves(compiled(call)(broken)[0])
    assert any(np.isnan(leaf).any() for leaf in leaves)


# Every call with one other dtype of mask, every dtype with a fourth of the calls.
MASK_DTYPES = (jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [(call, MASK_DTYPES[n % 4]) for n, call in enumerate(EVERYTHING.values())],
    ids=EVERYTHING.keys(),
)
def test_masks_of_any_dtype(call, dtype):
    @jax.jit
    def with_both(b):
        return call(b), call({**b, "mask": b["mask"].astype(dtype)})

    assert_same(*with_both(batch(1)), tolerance=0)


@everything
def test_a_batch_without_tokens_gives_zero_and_no_gradient(call):
    b = batch(2, np.zeros((BATCH, TIME), bool))
    for leaf in jax.tree.leaves(compiled(call)(b)):
        assert not np.any(leaf)


@everything
def test_one_token_per_row_is_finite(call):
    b = batch(3, np.eye(BATCH, TIME, dtype=bool))
    for leaf in jax.tree.leaves(compiled(call)(b)):
        assert np.all(np.isfinite(leaf))


@everything
@given(seeds)
@few
def test_padding_adds_nothing(call, seed):
    b = batch(seed)

    def pad(array, before, after, rows):
        width = [(0, rows), (before, after), (0, 0)][: array.ndim]
        return jnp.pad(array, width, constant_values=1 if array.dtype != bool else False)

    padded = {name: pad(array, 2, 1, 1) for name, array in b.items()}
    padded["groups"] = padded["groups"].at[BATCH:].set(99)

    def check(full, cut):
        if full.ndim >= 2:
            assert not np.any(full[BATCH:]) and not np.any(full[:, :2])
            full = full[:BATCH, 2 : 2 + TIME]
        np.testing.assert_allclose(full, cut, rtol=1e-6, atol=1e-6)

    jax.tree.map(check, compiled(call)(padded), compiled(call)(b))


@everything
@given(seeds)
@few
def test_the_order_of_rows_does_not_matter(call, seed):
    b = batch(seed)
    order = np.random.default_rng(seed).permutation(BATCH)
    permuted = {name: array[order] for name, array in b.items()}
    expected = jax.tree.map(lambda x: x[order] if x.ndim >= 2 else x, compiled(call)(b))
    assert_same(compiled(call)(permuted), expected, tolerance=2e-6)


@everything
@given(seeds)
@few
def test_holes_equal_the_compressed_sequence(call, seed):
    b = batch(seed)
    # True tokens first, in their order; what was between them goes to the end.
    order = jnp.argsort(~b["mask"], axis=1, stable=True)

    def compress(array):
        if array.ndim < 2:
            return array
        index = order[..., None] if array.ndim > 2 else order
        return jnp.take_along_axis(array, index, axis=1)

    compressed = jax.tree.map(compress, b)
    assert not np.any(np.diff(compressed["mask"].astype(int), axis=1) > 0)
    expected = jax.tree.map(compress, compiled(call)(b))
    assert_same(compiled(call)(compressed), expected, tolerance=2e-6)


@everything
def test_jit(call):
    b = batch(4)
    assert_same(compiled(call)(b)[0], call(b), tolerance=2e-6)


@pytest.mark.parametrize("call", PER_TOKEN.values(), ids=PER_TOKEN.keys())
def test_vmap_and_a_single_row_equal_the_batch(call):
    b = batch(5)
    whole = jax.jit(call)(b)
    assert_same(jax.jit(jax.vmap(call))(b), whole)
    for row in range(BATCH):
        single = jax.jit(call)(jax.tree.map(lambda x, row=row: x[row], b))
        assert_same(single, jax.tree.map(lambda x, row=row: x[row], whole))


@pytest.mark.parametrize("call", SCALAR.values(), ids=SCALAR.keys())
def test_vmap_over_batches_and_a_single_row(call):
    first, second = batch(6), batch(7)
    both = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    alone = jax.jit(call)
    separate = jax.tree.map(lambda *x: jnp.stack(x), alone(first), alone(second))
    assert_same(jax.jit(jax.vmap(call))(both), separate)
    row = jax.tree.map(lambda x: x[1], first)
    assert_same(alone(row), alone(jax.tree.map(lambda x: x[1:2], first)))


@pytest.mark.parametrize("call", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_extra_leading_axes(call):
    b = batch(8)
    deep = {name: array[None] for name, array in b.items()}
    expected = jax.tree.map(lambda x: x[None] if x.ndim >= 2 else x, jax.jit(call)(b))
    assert_same(jax.jit(call)(deep), expected)


@everything
def test_half_precision_is_computed_in_float32(call):
    b = batch(9, dtype=jnp.bfloat16)
    raised = {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in b.items()
    }
    result = jax.jit(call)(b)
    assert_same(result, jax.jit(call)(raised), tolerance=0)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(result)}


@everything
def test_mixed_precision_needs_no_cast(call):
    b = batch(10)
    mixed = {name: b[name].astype(jnp.bfloat16) for name in ("logprobs", "values", "advantages")}
    rounded = {name: x.astype(jnp.float32) for name, x in mixed.items()}
    assert_same(jax.jit(call)(b | mixed), jax.jit(call)(b | rounded), tolerance=0)


@everything
def test_float64_stays_float64(call):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(jax.eval_shape(call, batch(11, dtype=jnp.float64)))
    assert jnp.float32 not in {leaf.dtype for leaf in leaves}


@everything
def test_only_current_quantities_carry_gradients(call):
    b = batch(12)
    constants = ["old_logprobs", "ref_logprobs", "advantages", "importance_weights", "old_values"]
    constants += ["returns", "rewards", "gamma", "lam"]
    if call in calls_advantages.EVERYTHING:
        # An advantage is a fact: the critic does not learn through its own targets.
        constants += ["values", "logprobs"]
    slopes = jax.jit(jax.grad(total(call)))({name: b[name] for name in constants}, b)
    assert not any(np.any(slope) for slope in slopes.values())


def test_shapes_that_would_broadcast_by_accident_are_refused():
    square = jnp.ones((3, 3))
    row = jnp.ones(3)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\).*advantages\[:, None\]"):
        jrl.ppo_loss(square, square, row, square)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\).*over \(3, 3\).*lam\[:, None\]"):
        jrl.gae(square, square, square, lam=row)
    with pytest.raises(ValueError, match=r"importance_weights has shape \(3,\)"):
        jrl.ppo_loss(square, square, square, square, importance_weights=row)
