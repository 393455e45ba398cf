"""Grouped products of tokens that each choose several groups: moved by the product, or by another
kernel before or after it.

`forward` is the product of the tokens, `matrices` the gradient of its matrices, `pulled` that of
the second product's, where tokens stand for what pulls at sums, and `units` what that passes on to
gate, up and probs; `sums` is a second product, and its rows added up for each token. Another kernel
is another entry of `FORMS`. Work is that of the product.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from benchmarks.gpu.grouped import compared, operands_of, some_rows
from benchmarks.gpu.rows import (
    Figures,
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

CHOICES = 8
"""Rows that are copies of a token."""
PASSES = ("forward", "matrices", "pulled", "units", "sums")
COMPARED = 8
"""Tokens whose sums are compared."""


class Operands(NamedTuple):
    """Of all passes.

    Attributes:
      tokens: ``[token, inner]``, of an eighth as many as rows.
      choices: ``[row]`` which choice each row is, ``token * CHOICES + column``.
      places: ``[token, CHOICES]`` the row of each choice.
      up: ``[group, inner, outer]``.
      down: ``[group, outer, inner]``.
      hidden: ``[row, outer]``.
      kept: ``[row, 2 outer]``, gate and up.
      probs: ``[row]``.
      sizes: rows of each group.
    """

    tokens: Any
    choices: Any
    places: Any
    up: Any
    down: Any
    hidden: Any
    kept: Any
    probs: Any
    sizes: Any

    @property
    def source(self) -> Any:
        """The token that each row is a copy of."""
        return self.choices // CHOICES


def _moving(which: str, **options: Any) -> Callable[..., Any]:
    """Products that gather the rows they read or, of `sums`, scatter those they write."""
    from moe.kernels.grouped import multiply_rows, sum_products
    from moe.kernels.rows import combine
    from moe.kernels.swiglu import hidden_gradients

    def run(*arrays):
        of = Operands(*arrays)
        given = {"source": of.source, **options}
        if which == "forward":
            return multiply_rows(0, of.tokens, of.up, of.sizes, **given)
        if which == "matrices":
            return sum_products(of.tokens, of.hidden, of.sizes, **given)
        if which == "pulled":
            return sum_products(of.hidden, of.tokens, of.sizes, gathered=1, **given)
        if which == "units":
            return hidden_gradients(of.tokens, of.down, of.kept, of.probs, of.sizes, **given)
        rows = multiply_rows(0, of.hidden, of.down, of.sizes, destination=of.choices, **options)
        in_order = _choices_in_order(of.places)
        return combine(rows, in_order, implementation="mosaic")

    return run


def _choices_in_order(places: Any) -> Any:
    import jax.numpy as jnp

    return jnp.arange(places.size, dtype=places.dtype).reshape(places.shape)


def _moved(which: str, name: str) -> Callable[..., Any]:
    """Rows written and added up by the kernels of `permute` or by XLA, the product of that name."""
    import jax

    from moe.experts.gated import apply_gate
    from moe.experts.grouped_dot import IMPLEMENTATIONS
    from moe.kernels.rows import combine, take
    from moe.kernels.swiglu import hidden_gradients

    kernel = "mosaic" if name == "mosaic" else "plain"
    product = IMPLEMENTATIONS[name]

    def run(*arrays):
        of = Operands(*arrays)
        if which == "sums":
            rows = product.multiply_rows(0, of.hidden, of.down, of.sizes)
            return combine(rows, of.places, implementation=kernel)
        rows = take(of.tokens, of.source, implementation=kernel)
        if which == "forward":
            return product.multiply_rows(0, rows, of.up, of.sizes)
        if which == "matrices":
            return product.sum_products(rows, of.hidden, of.sizes)
        if which == "pulled":
            return product.sum_products(of.hidden, rows, of.sizes)
        if name == "mosaic":
            return hidden_gradients(rows, of.down, of.kept, of.probs, of.sizes)
        return jax.vjp(apply_gate, of.kept, of.probs)[1](
            product.multiply_rows(1, rows, of.down, of.sizes)
        )

    return run


def _simulated(which: str) -> Callable[..., Any]:
    from moe.kernels.grouped import Tiling

    small = Tiling(rows=64, columns=64, depth=64, stages=2, wide=2)
    return _moving(which, tiling=small, simulated=True)


FORMS: dict[str, tuple[Callable[[str], Callable[..., Any]], Callable[[], str | None]]] = {
    "mosaic": (_moving, needs_gpu),
    "moved, mosaic": (partial(_moved, name="mosaic"), needs_gpu),
    "moved, ragged_dot": (partial(_moved, name="ragged_dot"), lambda: None),
}
"""How each pass is made, and what is missing for it."""


def rows(settings: Settings) -> Iterator[Row]:
    """Rows spread evenly over the groups, each a copy of one of an eighth as many tokens."""
    for name, shape in (SMALL_PRODUCTS if settings.small else PRODUCTS).items():
        operands = cache(partial(_operands, settings, shape))
        for which in PASSES:
            for form, (make, needs) in FORMS.items():
                run = partial(_product, settings, operands, make, which)
                yield Row(f"gathered/{name}/{which}", form, run, needs())
        if not on_gpu() and settings.small:
            # The simulator knows this pass in every JAX.
            run = partial(_product, settings, operands, _simulated, "forward")
            yield Row(f"gathered/{name}/forward", "simulated", run)


def _operands(settings: Settings, shape: Product) -> Operands:
    """Rows in any order, as many of each token."""
    import jax
    import jax.numpy as jnp

    rows, up, hidden, sizes = operands_of(settings, shape, "balanced")
    key = jax.random.key(settings.seed)
    choices = jax.random.permutation(key, jnp.arange(shape.rows, dtype=jnp.int32))
    return Operands(
        tokens=rows[: shape.rows // CHOICES],
        choices=choices,
        places=jnp.argsort(choices).astype(jnp.int32).reshape(-1, CHOICES),
        up=up,
        down=random(settings, 4, (shape.groups, shape.outer, shape.inner)),
        hidden=hidden,
        kept=random(settings, 5, (shape.rows, 2 * shape.outer)),
        probs=jax.random.uniform(key, (shape.rows,)),
        sizes=sizes,
    )


def _product(
    settings: Settings,
    operands: Callable[[], Operands],
    make: Callable[[str], Callable[..., Any]],
    which: str,
) -> Figures:
    import jax

    of = operands()
    work = Work(2 * of.hidden.size * of.tokens.shape[1], "operations")
    compare = partial(_compared, which, of)
    return measured(jax.jit(make(which)), of, work, settings, compare)


def _compared(which: str, of: Operands, found: Any) -> float:
    """The difference from float32, as `benchmarks.gpu.grouped.compared`; of some tokens' sums."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe.experts.gated import apply_gate

    if which == "sums":
        some = np.sort(np.random.default_rng().choice(len(of.tokens), COMPARED, replace=False))
        group = np.searchsorted(np.cumsum(of.sizes), np.asarray(of.places[some]), "right")
        expected = [
            jnp.sum(exact("ki,kio->ko", of.hidden[of.places[token]], of.down[groups]), axis=0)
            for token, groups in zip(some, group, strict=True)
        ]
        return difference(found[some], jnp.stack(expected))
    rows = of.tokens[of.source]
    if which == "pulled":
        return compared("matrices", of.hidden, of.down, rows, of.sizes, found)
    if which != "units":
        return compared(which, rows, of.up, of.hidden, of.sizes, found)
    some, by_hidden = some_rows("rows", rows, of.down, of.sizes)
    wide = of.kept[some].astype(jnp.float32)
    expected = jax.vjp(apply_gate, wide, of.probs[some])[1](by_hidden)
    return max(difference(a[some], b) for a, b in zip(found, expected, strict=True))
