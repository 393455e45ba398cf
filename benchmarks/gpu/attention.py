"""The implementations of core attention on causal rows, forward and with gradients."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from benchmarks.gpu.networks import network
from benchmarks.gpu.rows import (
    Figures,
    Row,
    Settings,
    Work,
    difference,
    measured,
    needs_gpu,
    random,
)
from benchmarks.gpu.shapes import MOE_4B, SMALL_MOE

FORMS = ("cudnn", "mosaic", "blocked", "xla", "plain")


def rows(settings: Settings) -> Iterator[Row]:
    """Two rows of 4096 tokens, 16 heads and 4 of keys and values; then with a sink for each head
    and a window of 128 tokens, as in gpt-oss."""
    batch, length, window = (2, 16, 5) if settings.small else (2, 4096, 128)
    yield from _of_mask(settings, batch, length, None, f"{batch} x {length}")
    named = f"{batch} x {length}, sinks, window {window}"
    yield from _of_mask(settings, batch, length, window, named)


def _of_mask(
    settings: Settings, batch: int, length: int, window: int | None, named: str
) -> Iterator[Row]:
    """Causal rows; with a window also sinks."""
    import jax

    config = network(SMALL_MOE if settings.small else MOE_4B)

    @cache
    def operands() -> tuple[Any, ...]:
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        given = tuple(
            random(settings, number, (batch, length, one, config.head_dim))
            for number, one in enumerate(heads)
        )
        sinks = () if window is None else (random(settings, 3, (config.num_heads,), "float32"),)
        return *given, *sinks

    # Keys that queries see, on average about half of them or a window.
    seen = length / 2 if window is None else min(window, length)
    for which, products in (("forward", 2), ("both", 6)):
        # Queries with keys and weights with values.
        amount = 2 * products * batch * length * seen * config.num_heads * config.head_dim
        for form in FORMS:

            def run(form=form, which=which, amount=amount) -> Figures:
                program, given = jax.jit(_program(form, which, batch, length, window)), operands()
                compare = partial(_compared, which, window, given)
                return measured(program, given, Work(amount, "operations"), settings, compare)

            needs = needs_gpu() if form in ("cudnn", "mosaic") else None
            yield Row(f"attention/{named}/{which}", form, run, needs)


def _program(
    form: str, which: str, batch: int, length: int, window: int | None
) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    from moe.attention.core import core_attention
    from moe.ops.mask import Mask, TokenIndices

    column = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    marks = TokenIndices(column, column, jnp.ones_like(column))
    mask = Mask(marks, marks, window, causal=True, single=True)

    def forward(query, key, value, sinks=None):
        return core_attention(query, key, value, mask, implementation=form, sinks=sinks)

    def both(*given):
        out, back = jax.vjp(forward, *given)
        return out, *back(out)

    return forward if which == "forward" else both


def _compared(which: str, window: int | None, operands: tuple[Any, ...], found: Any) -> float:
    """The difference from the plain twin in float32, of the first row."""
    import jax
    import jax.numpy as jnp

    few = [(x[:1] if x.ndim > 1 else x).astype(jnp.float32) for x in operands]
    plain = jax.jit(_program("plain", which, 1, operands[0].shape[1], window))
    with jax.default_matmul_precision("highest"):
        expected = jax.tree.leaves(plain(*few))
    # Gradients are of an output that was rounded, and half of what it is made of was too.
    worst = 1e-2 if which == "forward" else 2e-2
    pairs = zip(jax.tree.leaves(found), expected, strict=True)
    # The gradient of sinks is a sum over all rows.
    return max(difference(a[:1], b, worst) for a, b in pairs if b.ndim > 1)
