"""The network on a folded mesh is near the network on one device in half precision."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from parity import CASES, CONFIGS, on_one_device, run, without_execution

# Tokens that are gathered, alone: nothing is rounded on the way that is not on one device.
# Elsewhere sums of some experts or parts of a product are, to 8 bits, before they are added up over
# the axis.
EXACT_IN_HALF = [("routed", "dp4 / ep4")]
HALF = [
    *EXACT_IN_HALF,
    ("chunks", "dp4 / ep4"),
    ("routed", "cp2"),
    ("traded", "cp4 / ep4"),
    ("routed", "dp2 / etp2"),
    ("dense", "tp2"),
    ("dense", "pp2"),
]


def within(tolerance):
    """Whether the difference of two arrays is that much of the second, or less."""
    return lambda a, b: np.testing.assert_array_less(
        np.linalg.norm(a - b), tolerance * np.linalg.norm(b)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), HALF)
def test_equals_one_device_in_half_precision(name, layout):
    config = replace(CONFIGS[name], dtype="bfloat16")
    (value, stats), grads = run(config, layout)
    (expected, expected_stats), expected_grads = on_one_device(without_execution(config))
    exact = (name, layout) in EXACT_IN_HALF
    # Exact, or the mean over tokens of what some roundings to 8 bits do to a hidden state.
    np.testing.assert_allclose(value, expected, rtol=2e-6 if exact else 2**-8)
    if stats is not None:
        np.testing.assert_array_equal(stats.load, expected_stats.load)

    # Some fifty roundings to 8 bits one after the other, of 2^-9 each, in no order.
    jax.tree.map(within(2**-5), grads, expected_grads)
    if exact:
        # These are summed in float32: experts' matrices, routers, and all of the residual stream.
        for part in ("embedding", "norm", "head"):
            within(1e-6)(getattr(grads, part), getattr(expected_grads, part))
        own, other = grads.layers, expected_grads.layers
        jax.tree.map(within(1e-6), (own.experts, own.norm), (other.experts, other.norm))


# Further from one device than the bound of the others, as one device is from float32: held by that.
FAR_FROM_FLOAT32 = "delta", "delta two", "shared"
# Axis by axis the plain one is above.
ALL_AXES = "tp2 cp2 dp4 / ep8 etp2"
TABLE = [(name, layout) for name, layout in CASES if name != "routed" or layout == ALL_AXES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_the_whole_table_in_half_precision(name, layout):
    """Choices are given: where two experts are all but equal, roundings decide between them."""
    config = replace(CONFIGS[name], dtype="bfloat16")
    (value, stats), grads = run(config, layout, replayed=True)
    one = on_one_device(without_execution(config), replayed=True)
    (expected, expected_stats), expected_grads = one
    np.testing.assert_allclose(value, expected, rtol=2**-8)
    if name in FAR_FROM_FLOAT32:
        # One device rounds once where a mesh rounds each part.
        _, precise = on_one_device(without_execution(CONFIGS[name]), replayed=True)
        jax.tree.map(
            lambda a, b, exact: np.testing.assert_array_less(
                np.linalg.norm(a - b), 3 * np.linalg.norm(b - exact)
            ),
            grads,
            expected_grads,
            precise,
        )
    else:
        jax.tree.map(within(2**-5), grads, expected_grads)
    if stats is not None:
        np.testing.assert_array_equal(stats.load, expected_stats.load)
        np.testing.assert_array_equal(stats.replayed, expected_stats.replayed)
