"""Every kernel at the awkward sizes of the tests' table, compared with float32; nothing is timed.

On a CPU the kernels that can be interpreted are, at some of the sizes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.dispatch import MOVES, arrays_of, checked_move, program_of
from benchmarks.gpu.rows import Figures, Row, Settings, difference, kernel_forms, needs_gpu, random
from benchmarks.kernel_cases import (
    CASES,
    GATHERED,
    PRODUCTS,
    Case,
    Product,
    choices,
    sources,
)

SMALL = ("tiles",)


def rows(settings: Settings) -> Iterator[Row]:
    """A row for each case: the worst difference of all that is computed at its sizes."""
    *_, form = kernel_forms(settings)
    for name, case in CASES.items():
        if not settings.small or name in SMALL:
            run = partial(_dispatched, settings, case, form)
            yield Row(
                f"cases/dispatch/{name}", form, run, needs_gpu() if form == "mosaic" else None
            )
    for name, product in PRODUCTS.items():
        if not settings.small or name == "fewer rows than a tile":
            run = partial(_multiplied, settings, product)
            yield Row(f"cases/grouped/{name}", "mosaic", run, needs_gpu())
            run = partial(_gathered, settings, product)
            yield Row(f"cases/gathered/{name}", "mosaic", run, needs_gpu())


def _dispatched(settings: Settings, case: Case, form: str) -> Figures:
    """The layout, whose twin is equal, and all moves."""
    import jax

    from moe.kernels.layout import slots_needed, sorted_layout

    slots = int(case.room * slots_needed(case.tokens * case.k, case.experts, case.tile))
    ids = choices(case, settings.seed)

    def layout(which: str) -> Any:
        options = {"tile": case.tile, "num_slots": slots, "implementation": which}
        return jax.jit(lambda ids: sorted_layout(ids, case.experts, **options))(ids)

    expected, found = layout("plain"), layout(form)
    if any((a != b).any() for a, b in zip(found, expected, strict=True)):
        raise ValueError("the layout is not that of the plain twin")
    arrays, worst = arrays_of(expected, case.width, settings), 0.0
    for move in MOVES:
        program, operands = program_of(arrays, move, form)
        worst = max(worst, checked_move(arrays, move)(program(*operands)))
    return {"difference": worst}


def _multiplied(settings: Settings, product: Product) -> Figures:
    """All three products; NaN in rows of no group."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.grouped import each, summed

    known, groups = sum(product.sizes), len(product.sizes)
    wide = known + product.rest
    x, pull = (
        random(settings, at, (wide, width)).at[known:].set(jnp.nan)
        for at, width in enumerate((product.inner, product.outer))
    )
    weights = random(settings, 2, (groups, product.inner, product.outer))
    sizes = jnp.asarray(product.sizes, jnp.int32)
    programs: dict[str, Callable[[], Any]] = {
        "forward": lambda: jax.jit(partial(each, 0))(x, weights, sizes),
        "rows": lambda: jax.jit(partial(each, 1))(pull, weights, sizes),
        "matrices": lambda: jax.jit(summed)(x, pull, sizes),
    }
    expected = _looped(x, weights, pull, product.sizes)
    return {"difference": max(difference(run(), expected[name]) for name, run in programs.items())}


def _gathered(settings: Settings, product: Product) -> Figures:
    """The products that gather their rows; NaN in the one that those of no group are."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.grouped import each, summed

    x = random(settings, 0, (GATHERED, product.inner)).at[-1].set(jnp.nan)
    source = jnp.asarray(sources(product, settings.seed))
    pull = random(settings, 1, (len(source), product.outer))
    weights = random(settings, 2, (len(product.sizes), product.inner, product.outer))
    sizes = jnp.asarray(product.sizes, jnp.int32)
    forward = jax.jit(lambda *of: each(0, *of, source=source))(x, weights, sizes)
    matrices = jax.jit(lambda *of: summed(*of, source=source))(x, pull, sizes)
    rows = x.at[source].get(mode="fill", fill_value=0)
    expected = _looped(rows, weights, pull, product.sizes)
    found = {"forward": forward, "matrices": matrices}
    return {"difference": max(difference(found[name], expected[name]) for name in found)}


def _looped(x: Any, weights: Any, pull: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Group by group, in float64."""
    import numpy as np

    x, weights, pull = (np.asarray(array, np.float64) for array in (x, weights, pull))
    found = {
        "forward": np.zeros(pull.shape),
        "rows": np.zeros(x.shape),
        "matrices": np.zeros(weights.shape),
    }
    start = 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        found["forward"][mine] = x[mine] @ weights[group]
        found["rows"][mine] = pull[mine] @ weights[group].T
        found["matrices"][group] = x[mine].T @ pull[mine]
        start += size
    return found
