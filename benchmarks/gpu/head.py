"""Log-probabilities and entropies from a large vocabulary, with gradients: from all logits, and in
chunks of it."""

import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from benchmarks.gpu.rows import Figures, Row, Settings, Work, difference, measured, random


def rows(settings: Settings) -> Iterator[Row]:
    """16,384 tokens of width 2048 and 131,072 columns."""
    import jax
    import jax.numpy as jnp

    from benchmarks.vocabulary import forms, with_gradient

    tokens, width, vocab = (64, 16, 96) if settings.small else (16384, 2048, 131072)

    @cache
    def operands() -> tuple[Any, ...]:
        return (
            random(settings, 1, (width, vocab), "float32") / width**0.5,
            random(settings, 2, (tokens, width)),
            jax.random.randint(jax.random.key(settings.seed), (tokens,), 0, vocab),
            jnp.ones((2, tokens), jnp.float32),
        )

    named = forms([tokens, width, vocab], [vocab // 16, vocab // 4])
    plain, *_ = named

    def run(form: str) -> Figures:
        began = time.perf_counter()
        program = with_gradient(named[form]).lower(*operands()).compile()
        compiling = time.perf_counter() - began
        work = Work(6 * tokens * width * vocab, "operations")
        compare = partial(_compared, named[plain], operands())
        figures = measured(program, operands(), work, settings, compare)
        temporary = program.memory_analysis().temp_size_in_bytes
        return figures | {"compile_s": compiling, "temporary_gib": temporary / 2**30}

    for form in named:
        yield Row(f"head/{tokens} x {vocab}", form, partial(run, form))


def _compared(plain: Any, operands: tuple[Any, ...], found: Any) -> float:
    """The difference of the first tokens' results from those of all their logits in float32."""
    import jax
    import jax.numpy as jnp

    head, x, ids, _ = operands
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(plain)(head, x[:64].astype(jnp.float32), ids[:64])
    found = jax.tree.leaves(found[0])
    return max(difference(a[:64], b) for a, b in zip(found, expected, strict=True))
