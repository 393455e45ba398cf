"""pass@k: what it counts, how it holds up for large numbers, and what it refuses."""

import itertools
import re
from fractions import Fraction
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from annotations import unchecked

import jrl


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(num_samples):
    for correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        expected = oracles.share_of_draws(num_samples, correct, k)
        # Two divisions of small whole numbers.
        assert jrl.pass_at_k(num_samples, correct, k) == pytest.approx(expected, abs=1e-12)


LARGE = [(10**6, 1, 1000), (10**6, 999_001, 1000), (200, 3, 100), (10_000, 17, 64), (1000, 0, 7)]


def exactly(n, c, k):
    return Fraction(comb(n, k) - comb(n - c, k), comb(n, k))


def test_pass_at_k_of_large_integers_is_exact():
    for n, c, k in LARGE:
        result = jrl.pass_at_k(n, np.int64(c), k)
        # The last subtraction from one rounds, and nothing else does.
        assert isinstance(result, float) and abs(result - exactly(n, c, k)) < 2**-53


def test_pass_at_k_of_arrays_keeps_digits():
    for n, c, k in LARGE:
        result = jax.jit(jrl.pass_at_k, static_argnames="k")(n, jnp.array([c]), k=k)
        # A thousand logarithms of float32 are added, each off by half a unit.
        np.testing.assert_allclose(result, [float(exactly(n, c, k))], rtol=1e-5)
        assert result.dtype == jnp.float32


def test_pass_at_k_broadcasts_num_samples():
    correct = jnp.array([[0, 1], [2, 4]])

    @jax.jit
    def both(correct):
        return jrl.pass_at_k(4, correct, 2), jrl.pass_at_k(jnp.full((2, 2), 4), correct, 2)

    result, given_each = both(correct)
    np.testing.assert_array_equal(result, given_each)
    np.testing.assert_allclose(result, [[0, 1 / 2], [5 / 6, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4, 2, 0), "k=0 must lie in 1..num_samples, the samples per prompt."),
        ((4, 2, 5), "k=5 must lie in 1..4, the samples per prompt."),
        ((4, 5, 1), "num_correct=5 must lie in 0..4, the samples."),
        ((4, -1, 1), "num_correct=-1 counts responses and cannot be negative."),
        ((np.array([4, 3]), np.array([4, 2]), 4), "k=4 must lie in 1..3, the samples per prompt."),
        ((np.array([4, 3]), np.array([4, 4]), 2), "num_correct=4 must lie in 0..3, the samples."),
        ((4, np.array([4, -2]), 2), "num_correct=-2 must lie in 0..4, the samples."),
    ],
)
def test_pass_at_k_refuses_inconsistent_counts(counts, message):
    with unchecked(), pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jrl.pass_at_k(*counts)
