"""The network on a folded mesh is near the network on one device in half precision."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from half_precision import assert_near_for_half_precision
from parity import CASES, CONFIGS, on_one_device, run, without_execution

# Axis by axis, and all axes at once.
ROUTED = ("cp2", "dp2 / etp2", "tp2 cp2 dp4 / ep8 etp2")
TABLE = [
    *(("routed", layout) for layout in ROUTED),
    *(("dense", "tp2"), ("dense", "pp2"), ("chunks", "dp4 / ep4"), ("traded", "cp4 / ep4")),
    *((name, layout) for name, layout in CASES if name != "routed"),
]


@pytest.mark.slow
def test_tokens_that_are_gathered_alone_are_rounded_as_on_one_device():
    """Elsewhere sums of some experts or parts of a product are rounded to 8 bits before they are
    added up over the axis."""
    config = replace(CONFIGS["routed"], dtype="bfloat16")
    (value, stats), grads = run(config, "dp4 / ep4", replayed=True)
    one = on_one_device(without_execution(config), replayed=True)
    _, precise = on_one_device(without_execution(CONFIGS["routed"]), replayed=True)
    (expected, expected_stats), expected_grads = one
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_array_equal(stats.load, expected_stats.load)

    def near(a, b):
        np.testing.assert_array_less(np.linalg.norm(a - b), 1e-6 * np.linalg.norm(b))

    # These are summed in float32: experts' matrices, routers, and all of the residual stream.
    for part in ("embedding", "norm", "head"):
        near(getattr(grads, part), getattr(expected_grads, part))
    own, other = grads.layers, expected_grads.layers
    jax.tree.map(near, (own.experts, own.norm), (other.experts, other.norm))
    assert_near_for_half_precision(grads, expected_grads, precise)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), list(dict.fromkeys(TABLE)))
def test_the_whole_table_in_half_precision(name, layout):
    """Choices are given: where two experts are all but equal, roundings decide between them."""
    config = replace(CONFIGS[name], dtype="bfloat16")
    (value, stats), grads = run(config, layout, replayed=True)
    one = on_one_device(without_execution(config), replayed=True)
    _, precise = on_one_device(without_execution(CONFIGS[name]), replayed=True)
    (expected, expected_stats), expected_grads = one
    # The mean over tokens of what some fifty roundings of 2^-9 do to a hidden state.
    np.testing.assert_allclose(value, expected, rtol=2**-8)
    assert_near_for_half_precision(grads, expected_grads, precise)
    if stats is not None:
        np.testing.assert_array_equal(stats.load, expected_stats.load)
        np.testing.assert_array_equal(stats.replayed, expected_stats.replayed)
