"""Every implementation of the discounted sums against the scan, which is their definition."""

import functools
from typing import get_args

import chex
import jax
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import full_but

import jrl
from jrl.losses.advantages.recursion import SHORTEST_BLOCKED, Implementation

ROWS = 4
# Shorter than a block, a token more than the blocks hold, and whole blocks.
LENGTHS = [5, 33, 64]


def numbers(time, holes, seed=0):
    draw = np.random.default_rng(seed)
    shape = (ROWS, time)
    start, stop = draw.integers(0, time // 2 + 1, (ROWS, 1)), np.full((ROWS, 1), time)
    stop[1], stop[2] = time - time // 3, 0
    mask = (np.arange(time) >= start) & (np.arange(time) < stop)
    if holes:
        mask &= draw.random(shape) < 0.7
    return {
        "rewards": draw.normal(size=shape),
        "values": draw.normal(size=shape),
        "mask": mask,
        "bootstrap_value": draw.normal(size=ROWS),
    }


def decays(time):
    draw = np.random.default_rng(1)
    return {
        "one number": {"gamma": 0.99, "lam": 0.95},
        "one": {"gamma": 1.0, "lam": 1.0},
        "zero": {"gamma": 1.0, "lam": 0.0},
        "per row": {"gamma": 1.0, "lam": draw.uniform(0.5, 1, (ROWS, 1))},
        "per token": {"gamma": 0.9, "lam": draw.uniform(0, 1, (ROWS, time))},
        "both per token": {
            "gamma": draw.uniform(0, 1, (ROWS, time)),
            "lam": draw.uniform(0, 1, (ROWS, time)),
        },
    }


@functools.cache
def program(implementation):
    return jax.jit(lambda g, d: jrl.gae(**g, **d, implementation=implementation))


def run(implementation, given, decay):
    return jax.device_get(program(implementation)(given, decay))


@pytest.mark.parametrize("time", full_but(LENGTHS, 33))
@pytest.mark.parametrize("holes", full_but([False, True], True))
@pytest.mark.parametrize("kind", full_but(decays(1), "per row", "both per token"))
def test_gae_implementations_equal_the_oracle(time, holes, kind):
    with jax.enable_x64(True):
        inputs, decay = numbers(time, holes), decays(time)[kind]
        blocked, scan = run("blocked", inputs, decay), run("scan", inputs, decay)
    expected = oracles.gae(
        inputs["rewards"],
        inputs["values"],
        inputs["mask"],
        decay["gamma"],
        decay["lam"],
        inputs["bootstrap_value"],
    )
    # A few hundred float64 in another order.
    for actual in (blocked, scan):
        chex.assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", full_but(decays(1), "both per token"))
def test_gae_blocked_is_as_accurate_as_the_scan(kind):
    inputs, decay = numbers(2000, holes=False, seed=3), decays(2000)[kind]
    with jax.enable_x64(True):
        exact, _ = run("scan", inputs, decay)
    errors = {
        name: np.abs(run(name, inputs, decay)[0].astype(float) - exact).max()
        for name in get_args(Implementation)
    }
    # Sums of 2000 numbers of order one: both round, and which rounds less is a matter of luck.
    assert errors["blocked"] <= 4 * errors["scan"] + 1e-5, errors
    assert errors["blocked"] <= 2e-4


def test_gae_with_a_hole_in_one_row():
    inputs = numbers(40, holes=False)
    inputs["mask"][0, 30] = False
    blocked, scan = (run(name, inputs, {}) for name in get_args(Implementation))
    chex.assert_trees_all_close(blocked, scan, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("apart", full_but([64, 65, 66], 64))
def test_gae_with_more_than_255_holes(apart):
    inputs = numbers(256 * apart, holes=False)
    inputs["mask"][:] = False
    inputs["mask"][0] = np.arange(256 * apart) % apart != apart - 1
    blocked, scan = (run(name, inputs, {}) for name in get_args(Implementation))
    chex.assert_trees_all_close(blocked, scan, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", [[1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]])
def test_gae_of_rows_of_one_and_two_tokens(row):
    draw = np.random.default_rng(0)
    inputs = {
        "rewards": draw.normal(size=(1, 4)),
        "values": draw.normal(size=(1, 4)),
        "mask": np.array([row], bool),
        "bootstrap_value": np.array([0.7]),
    }
    blocked, scan = (run(name, inputs, {"lam": 0.5}) for name in ("blocked", "scan"))
    chex.assert_trees_all_close(blocked, scan, rtol=1e-6, atol=1e-6)


def test_gae_blocked_under_vmap():
    inputs = numbers(40, holes=True)
    full = run("blocked", inputs, {})
    rows = jax.jit(jax.vmap(lambda g: jrl.gae(**g, implementation="blocked")))(inputs)
    chex.assert_trees_all_close(rows, full, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_gae_on_devices_with_and_without_holes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    inputs = numbers(40, holes=False)
    inputs["mask"][3, 35] = False
    rows = P("data")
    parallel = jax.shard_map(
        lambda g: jrl.gae(**g, implementation="blocked"), mesh=mesh, in_specs=rows, out_specs=rows
    )
    chex.assert_trees_all_close(
        jax.jit(parallel)(inputs), run("scan", inputs, {}), rtol=2e-5, atol=2e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("time", [SHORTEST_BLOCKED - 1, SHORTEST_BLOCKED])
def test_gae_default_implementation_follows_the_length(time):
    inputs = numbers(time, holes=False)
    named = "blocked" if time >= SHORTEST_BLOCKED else "scan"
    chex.assert_trees_all_equal(run(None, inputs, {}), run(named, inputs, {}))
