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

FORMS = ("cudnn", "blocked", "xla", "plain")


def rows(settings: Settings) -> Iterator[Row]:
    """Two rows of 4096 tokens, 16 heads and 4 of keys and values."""
    import jax

    config = network(SMALL_MOE if settings.small else MOE_4B)
    batch, length = (2, 16) if settings.small else (2, 4096)

    @cache
    def operands() -> tuple[Any, ...]:
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        return tuple(
            random(settings, number, (batch, length, one, config.head_dim))
            for number, one in enumerate(heads)
        )

    for which, times in (("forward", 2), ("both", 6)):
        # Queries with keys and weights with values, half of them visible.
        amount = times * batch * length**2 * config.num_heads * config.head_dim
        for form in FORMS:

            def run(form=form, which=which, amount=amount) -> Figures:
                program, given = jax.jit(_program(form, which, batch, length)), operands()
                compare = partial(_compared, which, given)
                return measured(program, given, Work(amount, "operations"), settings, compare)

            needs = needs_gpu() if form == "cudnn" else None
            yield Row(f"attention/{batch} x {length}/{which}", form, run, needs)


def _program(form: str, which: str, batch: int, length: int) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    from moe.attention.core import core_attention
    from moe.attention.mask import Marks, Mask

    column = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    marks = Marks(column, column, jnp.ones_like(column))
    mask = Mask(marks, marks, causal=True, single=True)

    def forward(query, key, value):
        return core_attention(query, key, value, mask, implementation=form)

    def both(query, key, value):
        out, back = jax.vjp(forward, query, key, value)
        return out, *back(out)

    return forward if which == "forward" else both


def _compared(which: str, operands: tuple[Any, ...], found: Any) -> float:
    """The difference from the plain twin in float32, of the first row."""
    import jax
    import jax.numpy as jnp

    few = [array[:1].astype(jnp.float32) for array in operands]
    plain = jax.jit(_program("plain", which, 1, operands[0].shape[1]))
    with jax.default_matmul_precision("highest"):
        expected = jax.tree.leaves(plain(*few))
    # Gradients are of an output that was rounded, and half of what it is made of was too.
    worst = 1e-2 if which == "forward" else 2e-2
    pairs = zip(jax.tree.leaves(found), expected, strict=True)
    return max(difference(a[:1], b, worst) for a, b in pairs)
