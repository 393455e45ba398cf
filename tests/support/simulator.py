"""Support of Pallas' simulator for Mosaic GPU kernels."""

import jax
import pytest

TRANSPOSES = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)

simulates_transposes = pytest.mark.skipif(
    not TRANSPOSES, reason="the simulator of jax 0.10 knows no transposed reference"
)
"""Marks tests of kernels that multiply by a matrix as it does not lie in memory."""
