"""Length penalty and group selection."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import jitted
from hypothesis import given, settings
from hypothesis import strategies as st

import jrl

few = settings(max_examples=10, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (16384, 0),
        (16385, -0.000244),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -0.999756),
        (20480, -1),
        (20481, -1),
        (22528, -1),
    ],
)
def test_vector_overlong_1(length, penalty):
    result = jitted.overlong_penalty(np.array([length]), max_length=20480, buffer=4096)
    np.testing.assert_allclose(result, [penalty], atol=1e-6)


@pytest.mark.parametrize("buffer", [0, 1, 3, 7])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_overlong_oracle(buffer, dtype):
    lengths = np.arange(12)
    expected = [oracles.overlong_penalty(length, 7, buffer) for length in lengths]
    result = jitted.overlong_penalty(np.asarray(lengths, dtype), max_length=7, buffer=buffer)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_length_has_no_gradient():
    lengths = np.array([82.0, 90.0])
    slope = jax.jit(
        jax.grad(lambda n: jnp.sum(jrl.overlong_penalty(n, max_length=100, buffer=20)))
    )(lengths)
    np.testing.assert_array_equal(slope, [0, 0])


@pytest.mark.parametrize("buffer", [-1, 8])
def test_a_buffer_outside_the_response_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer={buffer} must lie between 0 and max_length=7"):
        jrl.overlong_penalty(jnp.array([1]), max_length=7, buffer=buffer)


@given(st.integers(0, 2**31))
@few
def test_informative_groups_oracle(seed):
    draw = np.random.default_rng(seed)
    scores, groups = draw.integers(0, 2, 11), draw.choice([-5, 3, 8, 2**30], 11)
    result = jax.jit(jrl.informative_groups)(np.asarray(scores), np.asarray(groups))
    assert result.tolist() == oracles.informative(scores, groups)


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32, jnp.bfloat16])
def test_informative_means_that_group_relative_advantages_differ_from_zero(dtype):
    scores = np.array([1, 0, 1, 1, 1, 0, 0]).astype(dtype)
    groups = np.array([6, 6, 2, 2, 9, 4, 4])
    informative = jitted.informative_groups(scores, groups)
    assert informative.tolist() == [True, True, False, False, False, False, False]
    advantages = jitted.grpo_advantages(scores.astype(np.float32), groups)
    np.testing.assert_array_equal(advantages != 0, informative)


def test_equal_scores_that_are_no_binary_fraction_are_equal():
    assert not np.any(jitted.informative_groups(np.full(7, 0.1), np.zeros(7, int)))
