"""Tolerances that are parts of the largest entry of each array."""

import chex
import jax
import numpy as np


def assert_trees_close_by_largest(found, expected, *, rtol: float, of_largest: float):
    """Asserts that each array of a tree equals its partner in `expected`, within `rtol` of each
    entry plus `of_largest` times its largest entry, for example 2e-6.

    A small entry of a gradient is a difference of terms as large as its neighbours, and has their
    error.
    """
    chex.assert_trees_all_equal_structs(found, expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        atol = of_largest * np.max(np.abs(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
