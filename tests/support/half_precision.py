"""Largest difference between two gradients in half precision."""

import jax
import numpy as np


def assert_near_for_half_precision(gradient, other, precise):
    """Asserts that each leaf is no further from `other` than three times what half precision costs
    there: the distance of `other` from `precise`, the same in float32.

    The distance depends on the leaf and on the processor's instructions: where terms cancel, what
    is left has the roundings of all of them. Two gradients with independent roundings of one size
    are a factor of sqrt(2) apart; a mesh rounds each part of a sum, one device only once.
    """

    def near(a, b, exact):
        np.testing.assert_array_less(np.linalg.norm(a - b), 3 * np.linalg.norm(b - exact))

    jax.tree.map(near, gradient, other, precise)
