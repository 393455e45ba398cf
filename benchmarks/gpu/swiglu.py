"""The kernels of experts that have SwiGLU in them, beside products with SwiGLU after or before.

`hidden` is the first product up to the hidden units, with gate and up that are kept; `gradients` is
what the second product's gradient passes on to gate, up and probs. Work is that of the product.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from benchmarks.gpu.grouped import some_rows
from benchmarks.gpu.rows import (
    Figures,
    Row,
    Settings,
    Work,
    difference,
    measured,
    needs_gpu,
    on_gpu,
    random,
)
from benchmarks.gpu.shapes import PRODUCTS, SMALL_PRODUCTS, Product
from benchmarks.grouped import group_sizes

PASSES = ("hidden", "gradients")


def _in_one(which: str, **options: Any) -> Callable[..., Any]:
    from moe.kernels.swiglu import hidden_gradients, hidden_units

    if which == "hidden":
        return lambda x, gate_up, down, inward, pull, *of: hidden_units(x, gate_up, *of, **options)
    return lambda x, gate_up, down, inward, pull, *of: hidden_gradients(
        pull, down, inward, *of, **options
    )


def _separate(which: str, name: str) -> Callable[..., Any]:
    """The product of that name, and SwiGLU by XLA."""
    import jax

    from moe.experts.gated import apply_gate
    from moe.experts.grouped_dot import IMPLEMENTATIONS

    each = IMPLEMENTATIONS[name].multiply_rows

    def hidden(x, gate_up, down, inward, pull, probs, sizes):
        inward = each(0, x, gate_up, sizes)
        return apply_gate(inward, probs), inward

    def gradients(x, gate_up, down, inward, pull, probs, sizes):
        return jax.vjp(apply_gate, inward, probs)[1](each(1, pull, down, sizes))

    return hidden if which == "hidden" else gradients


def _simulated(which: str) -> Callable[..., Any]:
    from moe.kernels.grouped import Tiling

    small = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)
    return _in_one(which, tiling=small, simulated=True)


FORMS: dict[str, tuple[Callable[[str], Callable[..., Any]], Callable[[], str | None]]] = {
    "mosaic": (_in_one, needs_gpu),
    "separate, mosaic": (partial(_separate, name="mosaic"), needs_gpu),
    "separate, ragged_dot": (partial(_separate, name="ragged_dot"), lambda: None),
}
"""How each pass is made, and what is missing for it."""


def rows(settings: Settings) -> Iterator[Row]:
    """Rows spread evenly over the groups; as many hidden units as the products have columns."""
    for name, shape in (SMALL_PRODUCTS if settings.small else PRODUCTS).items():
        operands = cache(partial(_operands, settings, shape))
        for which in PASSES:
            for form, (make, needs) in FORMS.items():
                run = partial(_measured, settings, operands, make, which)
                yield Row(f"swiglu/{name}/{which}", form, run, needs())
        if not on_gpu() and settings.small:
            # The simulator knows this pass in every JAX.
            run = partial(_measured, settings, operands, _simulated, "hidden")
            yield Row(f"swiglu/{name}/hidden", "simulated", run)


def _operands(settings: Settings, shape: Product) -> tuple[Any, ...]:
    """Rows, the matrices of both products, gate and up as kept, what pulls at the results, probs
    and sizes."""
    import jax
    import jax.numpy as jnp

    rows, inner, hidden, groups = shape
    return (
        random(settings, 1, (rows, inner)),
        random(settings, 2, (groups, inner, 2 * hidden)) / inner**0.5,
        random(settings, 3, (groups, hidden, inner)) / hidden**0.5,
        random(settings, 4, (rows, 2 * hidden)),
        random(settings, 5, (rows, inner)),
        jax.random.uniform(jax.random.key(settings.seed), (rows,)),
        jnp.asarray(group_sizes("balanced", rows, groups), jnp.int32),
    )


def _measured(
    settings: Settings,
    operands: Callable[[], tuple[Any, ...]],
    make: Callable[[str], Callable[..., Any]],
    which: str,
) -> Figures:
    import jax

    x, gate_up, down, *_ = operands()
    matrix = gate_up if which == "hidden" else down
    work = Work(2 * x.shape[0] * matrix.shape[1] * matrix.shape[2], "operations")
    compare = partial(_compared, which, operands())
    return measured(jax.jit(make(which)), operands(), work, settings, compare)


def _compared(which: str, operands: tuple[Any, ...], found: tuple[Any, Any]) -> float:
    """The difference from float32 at rows from everywhere."""
    import jax
    import jax.numpy as jnp

    from moe.experts.gated import apply_gate

    x, gate_up, down, inward, pull, probs, sizes = operands
    if which == "hidden":
        some, products = some_rows("forward", x, gate_up, sizes)
        expected = apply_gate(products, probs[some]), products
    else:
        some, by_hidden = some_rows("rows", pull, down, sizes)
        kept = inward[some].astype(jnp.float32)
        expected = jax.vjp(apply_gate, kept, probs[some])[1](by_hidden)
    return max(difference(a[some], b) for a, b in zip(found, expected, strict=True))
