"""Grouped products of tokens that each choose several groups: gathered by the product or before.

Another kernel is another entry of `FORMS`. Work is that of the product.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from benchmarks.gpu.grouped import compared, operands_of
from benchmarks.gpu.rows import Figures, Row, Settings, Work, measured, needs_gpu, on_gpu
from benchmarks.gpu.shapes import PRODUCTS, SMALL_PRODUCTS, Product

CHOICES = 8
"""Rows that are copies of a token."""


def _gathering(side: str, **options: Any) -> Callable[..., Any]:
    from moe.kernels.grouped import each, summed

    if side == "forward":
        return lambda x, source, w, pull, sizes: each(0, x, w, sizes, source=source, **options)
    return lambda x, source, w, pull, sizes: summed(x, pull, sizes, source=source, **options)


def _taken(side: str, name: str) -> Callable[..., Any]:
    """Rows written by the kernel of `permute` or by XLA, then the product of that name."""
    from moe.experts.grouped.dot import IMPLEMENTATIONS
    from moe.kernels.rows import take

    kernel = "mosaic" if name == "mosaic" else "plain"
    product = IMPLEMENTATIONS[name]

    def run(x, source, weights, pull, sizes):
        rows = take(x, source, implementation=kernel)
        if side == "forward":
            return product.each(0, rows, weights, sizes)
        return product.summed(rows, pull, sizes)

    return run


def _simulated(side: str) -> Callable[..., Any]:
    from moe.kernels.grouped import Tiling

    small = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)
    return _gathering(side, tiling=small, simulated=True)


FORMS: dict[str, tuple[Callable[[str], Callable[..., Any]], Callable[[], str | None]]] = {
    "mosaic": (_gathering, needs_gpu),
    "take, mosaic": (partial(_taken, name="mosaic"), needs_gpu),
    "gather, ragged_dot": (partial(_taken, name="ragged_dot"), lambda: None),
}
"""How each pass is made, and what is missing for it."""


def rows(settings: Settings) -> Iterator[Row]:
    """Rows spread evenly over the groups, each a copy of one of an eighth as many tokens."""
    for name, shape in (SMALL_PRODUCTS if settings.small else PRODUCTS).items():
        operands = cache(partial(_operands, settings, shape))
        for side in ("forward", "matrices"):
            for form, (make, needs) in FORMS.items():
                run = partial(_product, settings, operands, make, side)
                yield Row(f"gathered/{name}/{side}", form, run, needs())
        if not on_gpu() and settings.small:
            # The simulator knows this pass in every JAX.
            run = partial(_product, settings, operands, _simulated, "forward")
            yield Row(f"gathered/{name}/forward", "simulated", run)


def _operands(settings: Settings, shape: Product) -> tuple[Any, ...]:
    """Tokens, of which one each row is, matrices, what pulls at the results, and sizes."""
    import jax

    rows, weights, pull, sizes = operands_of(settings, shape, "balanced")
    tokens = rows[: -(-shape.rows // CHOICES)]
    key = jax.random.key(settings.seed)
    source = jax.random.randint(key, (shape.rows,), 0, tokens.shape[0])
    return tokens, source, weights, pull, sizes


def _product(
    settings: Settings,
    operands: Callable[[], tuple[Any, ...]],
    make: Callable[[str], Callable[..., Any]],
    side: str,
) -> Figures:
    import jax

    x, source, weights, pull, sizes = operands()
    work = Work(2 * pull.shape[0] * x.shape[1] * pull.shape[1], "operations")
    compare = partial(compared, side, x[source], weights, pull, sizes)
    return measured(jax.jit(make(side)), operands(), work, settings, compare)
