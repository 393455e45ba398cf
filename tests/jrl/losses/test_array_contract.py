"""What every objective promises about arrays: masks, poison, padding, holes, dtypes, jit and vmap.

One table of calls, and each promise tried on all of them.
"""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, TIME, batch
from hypothesis import given, settings
from hypothesis import strategies as st

import jrl

MODES = get_args(jrl.Aggregation)


def _gae(b):
    return jrl.gae(b["rewards"], b["values"], b["mask"], gamma=b["gamma"], lam=b["lam"])


def _surrogate(b):
    arrays = (b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"])
    return jrl.ppo_surrogate(*arrays, clip_high=0.28, clip_dual=1.5)


def _kl(kind):
    return lambda b: jrl.kl_estimate(b["logprobs"], b["ref_logprobs"], b["mask"], kind=kind)


def _ppo_loss(mode):
    return lambda b: jrl.ppo_loss(
        b["logprobs"],
        b["old_logprobs"],
        b["advantages"],
        b["mask"],
        clip_high=0.28,
        clip_dual=1.5,
        importance_weights=b["importance_weights"],
        aggregation=mode,
        max_length=9,
    )


def _value_loss(clip):
    return lambda b: jrl.value_loss(
        b["values"], b["old_values"], b["returns"], b["mask"], clip=clip
    )


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "gae": _gae,
    "ppo_surrogate": _surrogate,
    "k1": _kl("k1"),
    "k2": _kl("k2"),
    "k3": _kl("k3"),
    "abs": _kl("abs"),
    "k3+": _kl("k3+"),
    "entropy": lambda b: jrl.entropy_from_logits(b["logits"], b["mask"]),
}
# One result per token that depends on the whole batch.
WHITENED = {
    "whiten": lambda b: jrl.whiten(b["advantages"], b["mask"]),
    "whiten, mean kept": lambda b: jrl.whiten(b["advantages"], b["mask"], keep_mean=True),
}
# One result per batch.
SCALAR = {
    **{
        mode: lambda b, mode=mode: jrl.aggregate(b["per_token"], b["mask"], mode, max_length=9)
        for mode in MODES
    },
    **{f"ppo_loss {mode}": _ppo_loss(mode) for mode in MODES},
    "value_loss": _value_loss(None),
    "value_loss clipped": _value_loss((0.2, 0.3)),
    "positive_example_loss": lambda b: jrl.positive_example_loss(
        b["logprobs"], b["correct"], b["mask"]
    ),
    "masked_mean": lambda b: jrl.masked_mean(b["per_token"], b["mask"]),
    "explained_variance": lambda b: jrl.explained_variance(b["values"], b["returns"], b["mask"]),
}
EVERYTHING = PER_TOKEN | WHITENED | SCALAR
DIFFERENTIABLE = ("per_token", "logprobs", "values", "logits")
ALIGNED = [name for name in batch(0) if name not in ("correct", "mask")]

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


def gradients(call, b):
    return jax.grad(total(call))({name: b[name] for name in DIFFERENTIABLE}, b)


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
    assert_same(call(poisoned), call(clean), tolerance=0)
    slopes = gradients(call, poisoned)
    assert_same(slopes, gradients(call, clean), tolerance=0)
    for slope in slopes.values():
        hidden = ~(MASK[..., None] if slope.ndim > MASK.ndim else MASK)
        assert not np.any(np.where(hidden, slope, 0))


@everything
def test_a_nan_that_counts_is_not_hidden(call):
    b = batch(0)
    broken = {name: b[name].at[1, 4].set(jnp.nan) for name in ALIGNED} | {
        "mask": b["mask"],
        "correct": jnp.ones(BATCH, bool),
    }
    leaves = jax.tree.leaves(call(broken))
    assert any(np.isnan(leaf).any() for leaf in leaves)


@everything
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16])
def test_masks_of_any_dtype(call, dtype):
    b = batch(1)
    assert_same(call({**b, "mask": b["mask"].astype(dtype)}), call(b), tolerance=0)


@everything
def test_a_batch_without_tokens_gives_zero_and_no_gradient(call):
    b = batch(2, np.zeros((BATCH, TIME), bool))
    for leaf in jax.tree.leaves(call(b)) + jax.tree.leaves(gradients(call, b)):
        assert not np.any(leaf)


@everything
def test_one_token_per_row_is_finite(call):
    b = batch(3, np.eye(BATCH, TIME, dtype=bool))
    for leaf in jax.tree.leaves(call(b)) + jax.tree.leaves(gradients(call, b)):
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

    def check(full, cut):
        if full.ndim >= 2:
            assert not np.any(full[BATCH:]) and not np.any(full[:, :2])
            full = full[:BATCH, 2 : 2 + TIME]
        np.testing.assert_allclose(full, cut, rtol=1e-6, atol=1e-6)

    jax.tree.map(check, call(padded), call(b))
    jax.tree.map(check, gradients(call, padded), gradients(call, b))


@everything
@given(seeds)
@few
def test_the_order_of_rows_does_not_matter(call, seed):
    b = batch(seed)
    order = np.random.default_rng(seed).permutation(BATCH)
    permuted = {name: array[order] for name, array in b.items()}
    expected = jax.tree.map(lambda x: x[order] if x.ndim >= 2 else x, call(b))
    assert_same(call(permuted), expected, tolerance=2e-6)
    slopes = jax.tree.map(lambda x: x[order], gradients(call, b))
    assert_same(gradients(call, permuted), slopes, tolerance=2e-6)


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
    assert_same(call(compressed), jax.tree.map(compress, call(b)), tolerance=2e-6)


@everything
def test_jit(call):
    b = batch(4)
    assert_same(jax.jit(call)(b), call(b), tolerance=2e-6)


@pytest.mark.parametrize("call", PER_TOKEN.values(), ids=PER_TOKEN.keys())
def test_vmap_and_a_single_row_equal_the_batch(call):
    b = batch(5)
    whole = call(b)
    assert_same(jax.vmap(call)(b), whole)
    for row in range(BATCH):
        single = call(jax.tree.map(lambda x, row=row: x[row], b))
        assert_same(single, jax.tree.map(lambda x, row=row: x[row], whole))


@pytest.mark.parametrize("call", SCALAR.values(), ids=SCALAR.keys())
def test_vmap_over_batches_and_a_single_row(call):
    first, second = batch(6), batch(7)
    both = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    separate = jax.tree.map(lambda *x: jnp.stack(x), call(first), call(second))
    assert_same(jax.vmap(call)(both), separate)
    row = jax.tree.map(lambda x: x[1], first)
    assert_same(call(row), call(jax.tree.map(lambda x: x[1:2], first)))


@pytest.mark.parametrize("call", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_extra_leading_axes(call):
    b = batch(8)
    deep = {name: array[None] for name, array in b.items()}
    expected = jax.tree.map(lambda x: x[None] if x.ndim >= 2 else x, call(b))
    assert_same(call(deep), expected)


@everything
def test_half_precision_is_computed_in_float32(call):
    b = batch(9, dtype=jnp.bfloat16)
    raised = {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in b.items()
    }
    result = call(b)
    assert_same(result, call(raised), tolerance=0)
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(result)}


@everything
def test_mixed_precision_needs_no_cast(call):
    b = batch(10)
    mixed = {name: b[name].astype(jnp.bfloat16) for name in ("logprobs", "values", "advantages")}
    rounded = {name: x.astype(jnp.float32) for name, x in mixed.items()}
    assert_same(call(b | mixed), call(b | rounded), tolerance=0)


@everything
def test_float64_stays_float64(call):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(call(batch(11, dtype=jnp.float64)))
    assert jnp.float32 not in {leaf.dtype for leaf in leaves}


def test_only_current_quantities_carry_gradients():
    b = batch(12)
    constants = ["old_logprobs", "ref_logprobs", "advantages", "importance_weights", "old_values"]
    constants += ["returns", "rewards", "gamma", "lam"]
    for call in EVERYTHING.values():
        slopes = jax.grad(total(call))({name: b[name] for name in constants}, b)
        assert not any(np.any(slope) for slope in slopes.values())
    # The critic does not learn through its own targets.
    slopes = jax.grad(total(_gae))({"values": b["values"]}, b)
    assert not np.any(slopes["values"])


def test_shapes_that_would_broadcast_by_accident_are_refused():
    square = jnp.ones((3, 3))
    row = jnp.ones(3)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\).*advantages\[:, None\]"):
        jrl.ppo_loss(square, square, row, square)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\).*over \(3, 3\).*lam\[:, None\]"):
        jrl.gae(square, square, square, lam=row)
    with pytest.raises(ValueError, match=r"importance_weights has shape \(3,\)"):
        jrl.ppo_loss(square, square, square, square, importance_weights=row)
