"""What the device does with a large copy and with one large product: the measure of all else."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.rows import (
    Figures,
    Row,
    Settings,
    Work,
    difference,
    exact,
    measured,
    needs_gpu,
    random,
)

COPY, DENSE = "ceilings/copy", "ceilings/dense"
WIDTH = 2048
"""Elements of a row of the array that is copied."""


def rows(settings: Settings) -> Iterator[Row]:
    """Copies of 2 GiB, read and written, in several ways, and the product of two square matrices.

    The fastest copy is the ceiling: XLA's negation, a kernel of one pass, leaves a fifth of an
    H200's bandwidth unused.
    """
    height, side = (2**4, 64) if settings.small else (2**19, 8192)

    def copy(form: str) -> Figures:
        x = random(settings, 0, (height, WIDTH))
        work = Work(2 * x.nbytes, "bytes")
        return measured(_copies()[form], (x,), work, settings)

    def product() -> Figures:
        x, y = (random(settings, number, (side, side)) for number in (1, 2))
        work = Work(2 * side**3, "operations")

        def compare(found):
            return difference(found[:64], exact("ri,io->ro", x[:64], y))

        return measured(_jitted(lambda x, y: x @ y), (x, y), work, settings, compare)

    yield Row(COPY, "device to device", partial(copy, "device to device"))
    yield Row(COPY, "take_rows", partial(copy, "take_rows"), needs_gpu())
    yield Row(COPY, "negation", partial(copy, "negation"))
    yield Row(DENSE, "jax", product)


def _copies() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp

    from moe.kernels.rows import take

    return {
        # One copy instruction, run by the driver.
        "device to device": _jitted(jnp.copy),
        "take_rows": _jitted(lambda x: take(x, jnp.arange(len(x)), implementation="mosaic")),
        "negation": _jitted(lambda x: -x),
    }


def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(function)
