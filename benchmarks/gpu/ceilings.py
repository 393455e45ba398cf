"""What the device does with a large copy and with one large product: the measure of all else."""

from collections.abc import Iterator

from benchmarks.gpu.rows import Figures, Row, Settings, Work, difference, exact, measured, random

COPY, DENSE = "ceilings/copy", "ceilings/dense"


def rows(settings: Settings) -> Iterator[Row]:
    """A negation of 2 GiB, read and written, and the product of two square matrices."""
    import jax

    elements, side = (2**14, 64) if settings.small else (2**30, 8192)

    def copy() -> Figures:
        x = random(settings, 0, (elements,))
        work = Work(2 * x.nbytes, "bytes")
        return measured(jax.jit(lambda x: -x), (x,), work, settings)

    def product() -> Figures:
        x, y = (random(settings, number, (side, side)) for number in (1, 2))
        work = Work(2 * side**3, "operations")

        def compare(found):
            return difference(found[:64], exact("ri,io->ro", x[:64], y))

        return measured(jax.jit(lambda x, y: x @ y), (x, y), work, settings, compare)

    yield Row(COPY, "jax", copy)
    yield Row(DENSE, "jax", product)
