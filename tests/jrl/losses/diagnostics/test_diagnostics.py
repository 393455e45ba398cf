"""Diagnostics: slow loops, published numbers, and what they must say of critics that are known."""

import inspect
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import numpy_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import full_but

from jrl import diagnostics

few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
ROW_LAM = np.array([0.3, 0.9, 1.0, 0.5, 0.7])
EDGES = (1, 4)


def close(actual, expected, where=""):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-12, err_msg=where)


@jax.jit
def everything(b):
    """All diagnostics of a batch in one program."""
    mask, rewards, values, returns = b["mask"], b["rewards"], b["values"], b["returns"]
    lam = jnp.asarray(ROW_LAM)[:, None]
    return {
        "by_position": diagnostics.by_position(values, returns, mask, num_bins=3),
        "calibration": diagnostics.calibration(
            values, b["correct"][:, None], mask, low=-1.0, high=1.0, num_bins=4
        ),
        "bootstrap_bias_bound": diagnostics.bootstrap_bias_bound(
            returns, b["advantages"], mask, 0.6
        ),
        "terminal_reach": diagnostics.terminal_reach(mask, lam=lam, gamma=0.9, threshold=0.2),
        "lambda_sensitivity": diagnostics.lambda_sensitivity(
            rewards, values, mask, lam=0.6, edges=EDGES
        ),
        "guard_rate": diagnostics.guard_rate(
            jnp.sum(mask, axis=1, dtype=jnp.int32), alpha=0.4, floor=0.2
        ),
        "within_between_variance": diagnostics.within_between_variance(b["advantages"], mask),
        "td_concentration": diagnostics.td_concentration(rewards, values, mask, share=0.3),
        "outcome_contradiction": diagnostics.outcome_contradiction(
            rewards, values, b["advantages"], mask
        ),
        "length_share": diagnostics.length_share(mask, edges=EDGES),
        "negative_share": diagnostics.negative_share(b["advantages"], mask),
        "group_degeneracy": diagnostics.group_degeneracy(b["correct"], b["groups"]),
        "bootstrap_bias": diagnostics.bootstrap_bias(returns, mask, 0.6),
        "discounted bootstrap_bias_bound": diagnostics.bootstrap_bias_bound(
            returns, b["advantages"], mask, 0.6, gamma=0.8
        ),
        "discounted td_concentration": diagnostics.td_concentration(
            rewards, values, mask, gamma=0.8, share=0.3
        ),
        "discounted outcome_contradiction": diagnostics.outcome_contradiction(
            rewards, values, b["advantages"], mask, gamma=0.8
        ),
    }


@pytest.mark.slow
@given(st.integers(0, 2**31))
@few
def test_oracles(seed):
    b = numpy_batch(seed)
    b["correct"] = b["correct"].astype(float)
    names = ("rewards", "values", "returns", "advantages", "mask")
    rewards, values, returns, advantages, mask = (b[name] for name in names)
    o = oracles.diagnostics
    with jax.enable_x64(True):
        found = everything({name: b[name] for name in (*names, "correct", "groups")})
        found = jax.device_get(found)
    expected = {
        "by_position": o.by_position(values, returns, mask, 3),
        "calibration": o.calibration(values, b["correct"], mask, -1.0, 1.0, 4),
        "bootstrap_bias_bound": o.bootstrap_bias_bound(returns, advantages, mask, 0.6),
        "terminal_reach": o.terminal_reach(mask, ROW_LAM, 0.9, 0.2),
        "lambda_sensitivity": o.lambda_sensitivity(rewards, values, mask, 0.6, EDGES),
        "within_between_variance": o.within_between_variance(advantages, mask),
        "td_concentration": o.td_concentration(rewards, values, mask, 0.3),
        "length_share": o.length_share(mask, EDGES),
        "negative_share": o.negative_share(advantages, mask),
        "group_degeneracy": o.group_degeneracy(b["correct"], b["groups"]),
        "guard_rate": [o.guard_rate(mask.sum(1), 0.4, 0.2)],
        "outcome_contradiction": [o.outcome_contradiction(rewards, values, advantages, mask)],
        "discounted bootstrap_bias_bound": o.bootstrap_bias_bound(
            returns, advantages, mask, 0.6, 0.8
        ),
        "discounted td_concentration": o.td_concentration(rewards, values, mask, 0.3, 0.8),
        "discounted outcome_contradiction": [
            o.outcome_contradiction(rewards, values, advantages, mask, 0.8)
        ],
    }
    for name, numbers in expected.items():
        record = found[name] if isinstance(found[name], tuple) else [found[name]]
        close(record, numbers, name)
    rows = [row[true] for row, true in zip(found["bootstrap_bias"], mask, strict=True)]
    close([row for row in rows if len(row)], o.bootstrap_bias(returns, mask, 0.6))


@pytest.mark.slow
def test_nothing_has_a_gradient():
    def numbers(b, floats, lam):
        of_lam = (
            diagnostics.bootstrap_bias_bound(b["returns"], b["advantages"], b["mask"], lam),
            diagnostics.terminal_reach(b["mask"], lam=lam, gamma=lam),
            diagnostics.lambda_sensitivity(b["rewards"], b["values"], b["mask"], lam=lam),
        )
        leaves = jax.tree.leaves((everything({**b, **floats}), of_lam))
        return [jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    with jax.enable_x64(True):
        b = numpy_batch(2)
        floats = {name: b[name] for name in ("rewards", "values", "returns", "advantages")}
        floats["correct"] = b["correct"].astype(float)
        assert len(jax.eval_shape(lambda *given: numbers(b, *given), floats, 0.6)) > 30
        slope = jax.jit(jax.grad(lambda *given: sum(numbers(b, *given)), argnums=(0, 1)))
        slopes, of_lam = jax.jit(slope)(floats, 0.6)
    for name, slope in slopes.items():
        assert not np.any(slope), name
    assert of_lam == 0


PER_RESPONSE = {
    "by_position": lambda v, g, a, m: diagnostics.by_position(v, g, m, num_bins=3),
    "calibration": lambda v, g, a, m: diagnostics.calibration(v, g > 0, m, low=-1.0, high=1.0),
    "bootstrap_bias": lambda v, g, a, m: diagnostics.bootstrap_bias(g, m, 0.6).reshape(4, -1),
    "bootstrap_bias_bound": lambda v, g, a, m: diagnostics.bootstrap_bias_bound(g, a, m, 0.6),
    "terminal_reach": lambda v, g, a, m: diagnostics.terminal_reach(m, lam=0.9, threshold=0.2),
    "lambda_sensitivity": lambda v, g, a, m: diagnostics.lambda_sensitivity(
        g, v, m, lam=0.6, edges=EDGES
    ),
    "within_between_variance": lambda v, g, a, m: diagnostics.within_between_variance(a, m),
    "td_concentration": lambda v, g, a, m: diagnostics.td_concentration(g, v, m, share=0.3),
    "outcome_contradiction": lambda v, g, a, m: diagnostics.outcome_contradiction(g, v, a, m),
    "length_share": lambda v, g, a, m: diagnostics.length_share(m, edges=EDGES),
    "negative_share": lambda v, g, a, m: diagnostics.negative_share(a, m),
}


@pytest.mark.parametrize("name", full_but(PER_RESPONSE, "by_position"))
def test_responses_in_several_axes_are_those_in_one(name):
    draw = np.random.default_rng(3)
    arrays = [np.asarray(draw.normal(size=(4, 6)), np.float32) for _ in range(3)]
    arrays.append(draw.random((4, 6)) < 0.7)
    folded = [x.reshape(2, 2, 6) for x in arrays]
    chex.assert_trees_all_close(
        jax.jit(PER_RESPONSE[name])(*folded),
        jax.jit(PER_RESPONSE[name])(*arrays),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: diagnostics.by_position(x, x, x, num_bins=0), "num_bins=0 must be at least 1"),
        (lambda x: diagnostics.calibration(x, x, x, low=1.0), "low=1.0 must be below high=1.0"),
        (lambda x: diagnostics.calibration(x, x, x, num_bins=0), "num_bins=0 must be at least 1"),
        (lambda x: diagnostics.length_share(x, edges=(4, 4)), r"edges=\(4, 4\) must increase"),
        (lambda x: diagnostics.td_concentration(x, x, x, share=0), r"share=0 must be in \(0, 1\]"),
        (lambda x: diagnostics.guard_rate(x[0], alpha=0), "alpha=0 must be positive"),
        (lambda x: diagnostics.terminal_reach(x, lam=x[0]), r"lam has shape \(3,\)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, np.ones((2, 3)))


@pytest.mark.parametrize("name", diagnostics.__all__)
def test_every_name_says_what_it_measures(name):
    thing = getattr(diagnostics, name)
    text = inspect.getdoc(thing) or ""
    if not inspect.isfunction(thing):
        assert all(f"  {field}: " in text for field in typing.get_type_hints(thing))
        return
    assert ">>>" in text and "Returns:" in text
    assert not [p for p in inspect.signature(thing).parameters if f"  {p}: " not in text]
    assert ("**Concern**" in text and "**Reading it.**" in text) or name == "relative_position"


@pytest.mark.slow
def test_on_eight_devices():
    # A batch statistic is one program on arrays cut over devices: the compiler adds the sums.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mask = np.arange(7) < np.random.default_rng(0).integers(0, 8, (16, 1))
    b = {name: np.asarray(x, np.float32) for name, x in numpy_batch(4, mask).items()}
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def some(b):
        return (
            diagnostics.by_position(b["values"], b["returns"], b["mask"]),
            diagnostics.td_concentration(b["rewards"], b["values"], b["mask"]),
            diagnostics.lambda_sensitivity(b["rewards"], b["values"], b["mask"], lam=0.7),
        )

    chex.assert_trees_all_close(some(jax.device_put(b, rows)), some(b), rtol=1e-5, atol=1e-5)
