"""Grouped products at published shapes: forward, gradient of the rows, of the matrices.

Another kernel is another entry of `FORMS`.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from benchmarks.gpu.rows import (
    Row,
    Settings,
    Work,
    difference,
    exact,
    measured,
    needs_gpu,
    on_gpu,
    random,
)
from benchmarks.gpu.shapes import PRODUCTS, SMALL_PRODUCTS, Product
from benchmarks.grouped import group_sizes
from benchmarks.kernel_cases import TILINGS

PASSES = ("forward", "rows", "matrices")
SPREADS = {"grouped": "balanced", "uneven": "Zipf"}
"""Sizes of the groups by the name of the row, of `benchmarks.grouped.group_sizes`."""
Programs = dict[str, Callable[..., Any]]
"""A program for each of `PASSES`, or for some: of rows, matrices, what pulls at the results, and
sizes."""


class Form(NamedTuple):
    """A way to compute grouped products.

    Attributes:
      programs: makes what is timed.
      needs: what is missing for it here; None where nothing is.
      takes: the shapes that it is tried at.
      passes: those of `PASSES` that it has.
    """

    programs: Callable[[], Programs]
    needs: Callable[[], str | None] = lambda: None
    takes: Callable[[Product], bool] = lambda shape: True
    passes: tuple[str, ...] = PASSES


def with_gradients(form: Callable[..., Any]) -> Programs:
    """The passes of a product that JAX differentiates."""
    import jax

    def forward(x, weights, pull, sizes):
        return form(x, weights, sizes)

    def of_rows(x, weights, pull, sizes):
        return jax.vjp(lambda x: form(x, weights, sizes), x)[1](pull)[0]

    def of_matrices(x, weights, pull, sizes):
        return jax.vjp(lambda weights: form(x, weights, sizes), weights)[1](pull)[0]

    return dict(zip(PASSES, (forward, of_rows, of_matrices), strict=True))


def _named(name: str) -> Programs:
    from moe.experts.grouped_dot import grouped_dot

    return with_gradients(partial(grouped_dot, implementation=name))


def _simulated() -> Programs:
    """The kernel under a simulator of the GPU, which is slow, and knows this pass in every JAX."""
    from moe.kernels.grouped import Tiling, multiply_rows

    small = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)
    return {
        "forward": lambda x, weights, pull, sizes: multiply_rows(
            0, x, weights, sizes, tiling=small, simulated=True
        )
    }


def _xla() -> Programs:
    import jax

    return with_gradients(jax.lax.ragged_dot)


def _tokamax() -> Programs:
    import tokamax  # pyright: ignore[reportMissingImports]

    return with_gradients(tokamax.ragged_dot)


def _shipped() -> Programs:
    """The reference kernels that come with JAX."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    cut: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "grid_block_n": 1}
    cut["max_concurrent_steps"] = 4
    each, summed = ragged_dot_mgpu.ragged_dot, transposed_ragged_dot_mgpu.transposed_ragged_dot
    return {
        "forward": lambda x, w, pull, sizes: each(x, w, group_sizes=sizes, **cut),
        "rows": lambda x, w, pull, sizes: each(
            pull, w, group_sizes=sizes, transpose_rhs=True, **cut
        ),
        "matrices": lambda x, w, pull, sizes: summed(x, pull, group_sizes=sizes, **cut),
    }


def _tiled(changed: dict[str, int]) -> Programs:
    """What "mosaic" computes, cut in another way."""
    from moe.kernels.grouped import Tiling, multiply_rows, sum_products

    tiling = Tiling()._replace(**changed)
    return {
        "forward": lambda x, w, pull, sizes: multiply_rows(0, x, w, sizes, tiling=tiling),
        "rows": lambda x, w, pull, sizes: multiply_rows(1, pull, w, sizes, tiling=tiling),
        "matrices": lambda x, w, pull, sizes: sum_products(x, pull, sizes, tiling=tiling),
    }


def missing(package: str) -> str | None:
    """What is said of a package that is not there; None where it is."""
    try:
        version(package)
    except PackageNotFoundError:
        return f"{package}, which is not installed"
    return None


FORMS = {
    "mosaic": Form(partial(_named, "mosaic"), needs_gpu),
    "simulated": Form(
        _simulated, takes=lambda shape: not on_gpu() and shape.rows < 200, passes=PASSES[:1]
    ),
    "tokamax": Form(_tokamax, lambda: missing("tokamax")),
    # Every tile looks through a list of all groups.
    "jax's kernel": Form(_shipped, needs_gpu, lambda shape: shape.groups <= 32),
    "batched": Form(partial(_named, "batched")),
    "blocks": Form(partial(_named, "blocks")),
    "ragged_dot": Form(_xla),
}
"""PyTorch's is in `benchmarks.gpu.torch_grouped`."""

TILED = {
    " ".join(f"{name} {size}" for name, size in changed.items()) or "as it is": Form(
        partial(_tiled, changed), needs_gpu
    )
    for changed in TILINGS
}


def rows(settings: Settings) -> Iterator[Row]:
    """Rows spread evenly over the groups."""
    yield from of_forms("grouped", FORMS, settings)


def uneven(settings: Settings) -> Iterator[Row]:
    """The same where the number of rows of a group falls as 1 / rank."""
    yield from of_forms("uneven", FORMS, settings)


def tilings(settings: Settings) -> Iterator[Row]:
    """The kernels, cut in other ways."""
    yield from of_forms("tilings", TILED, settings)


def of_forms(part: str, forms: dict[str, Form], settings: Settings) -> Iterator[Row]:
    spread = SPREADS.get(part, "balanced")
    for name, shape in (SMALL_PRODUCTS if settings.small else PRODUCTS).items():
        operands = cache(partial(operands_of, settings, shape, spread))
        for which in PASSES:
            for form, given in forms.items():
                if which in given.passes and given.takes(shape):
                    run = partial(_product, settings, operands, given, which)
                    yield Row(f"{part}/{name}/{which}", form, run, given.needs())


def operands_of(settings: Settings, shape: Product, spread: str) -> tuple[Any, ...]:
    """Rows, matrices, what pulls at the results, and sizes."""
    import jax.numpy as jnp

    return (
        random(settings, 1, (shape.rows, shape.inner)),
        random(settings, 2, (shape.groups, shape.inner, shape.outer)),
        random(settings, 3, (shape.rows, shape.outer)),
        jnp.asarray(group_sizes(spread, shape.rows, shape.groups), jnp.int32),
    )


def _product(
    settings: Settings, operands: Callable[[], tuple[Any, ...]], form: Form, which: str
) -> dict[str, Any]:
    import jax

    x, weights, pull, sizes = operands()
    work = Work(2 * x.shape[0] * x.shape[1] * pull.shape[1], "operations")
    compare = partial(compared, which, x, weights, pull, sizes)
    program = jax.jit(form.programs()[which])
    return measured(program, operands(), work, settings, compare)


def compared(which: str, x: Any, weights: Any, pull: Any, sizes: Any, found: Any) -> float:
    """The difference from float32 at rows from everywhere, or of the largest group's matrix: a
    reference of all would not fit."""
    import numpy as np

    if which == "matrices":
        stop, largest = np.cumsum(sizes), int(np.argmax(sizes))
        mine = slice(int(stop[largest] - sizes[largest]), int(stop[largest]))
        return difference(found[largest], exact("ri,ro->io", x[mine], pull[mine]))
    some, expected = some_rows(which, x if which == "forward" else pull, weights, sizes)
    return difference(found[some], expected)


def some_rows(which: str, given: Any, weights: Any, sizes: Any) -> tuple[Any, Any]:
    """Rows from everywhere, and the product of these, or its transpose, in float32."""
    import jax.numpy as jnp
    import numpy as np

    some = np.sort(np.random.default_rng().choice(len(given), min(len(given), 64), replace=False))
    group = np.searchsorted(np.cumsum(sizes), some, "right")
    formula = "ri,rio->ro" if which == "forward" else "ro,rio->ri"
    few = [
        exact(formula, given[some[at : at + 8]], weights[group[at : at + 8]])
        for at in range(0, len(some), 8)
    ]
    return some, jnp.concatenate(few)
