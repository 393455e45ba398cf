"""Attention of a decoding step over its cache: the kernel that reads what rows are long, and XLA's
that reads what there is room for. Of keys and values, and of narrow vectors of latent attention.

Bytes are those that the cache holds of the columns that rows see, each read once.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

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
from benchmarks.gpu.shapes import CACHES, SMALL_CACHES, Cached

FORMS = ("mosaic", "plain")


def rows(settings: Settings) -> Iterator[Row]:
    """Rows of any length up to that of the cache, and all of its length."""
    for name, shape in (SMALL_CACHES if settings.small else CACHES).items():
        for full in (False, True):
            lengths = f"of {shape.columns}" if full else f"of 1 to {shape.columns}"
            operands = cache(partial(_operands, settings, shape, full))
            attended = partial(_attended, settings, shape, operands)
            named = f"cached/{name}/{shape.rows} rows {lengths}"
            for form in FORMS:
                run = partial(attended, partial(_named, shape, form))
                yield Row(named, form, run, needs_gpu() if form == "mosaic" else None)
            # The simulator of jax 0.10 knows none of what narrow vectors are read by.
            if not on_gpu() and settings.small and not full and shape.rank is None:
                yield Row(named, "simulated", partial(attended, _simulated))


def _named(shape: Cached, form: str) -> Callable[..., Any]:
    from moe.kernels.decode_attention import decode_attention
    from moe.kernels.latent_decode import latent_decode_attention

    if shape.rank is None:
        return partial(decode_attention, implementation=form)
    fixed = {"scale": shape.head_dim**-0.5, "rank": shape.rank}
    return partial(latent_decode_attention, implementation=form, **fixed)


def _simulated() -> Callable[..., Any]:
    import jax.numpy as jnp

    from moe.kernels.decode_attention import split_attention

    def run(query, keys, values, first, stop):
        operands = query, keys[None], values[None], first, stop, jnp.int32(0)
        return split_attention(*operands, simulated=True)

    return run


def _operands(settings: Settings, shape: Cached, full: bool) -> tuple[Any, ...]:
    """Queries, what the cache holds, and the columns that each row sees."""
    import jax
    import jax.numpy as jnp

    heads = shape.rows, shape.kv_heads
    key = jax.random.key(settings.seed)
    lengths = jax.random.randint(key, (shape.rows,), 1, shape.columns + 1)
    held = [random(settings, 2, (*heads, shape.head_dim, shape.columns))]
    if shape.rank is None:
        held.append(random(settings, 3, (*heads, shape.columns, shape.head_dim)))
    return (
        random(settings, 1, (shape.rows, shape.heads, shape.head_dim)),
        *held,
        jnp.zeros(shape.rows, jnp.int32),
        jnp.full(shape.rows, shape.columns) if full else lengths,
    )


def _attended(
    settings: Settings,
    shape: Cached,
    operands: Callable[[], tuple[Any, ...]],
    make: Callable[[], Callable[..., Any]],
) -> Figures:
    import jax

    _, *held, _, stop = operands()
    of_column = sum(array.nbytes for array in held) / (shape.rows * shape.columns)
    work = Work(int(stop.sum()) * of_column, "bytes")
    compare = partial(_compared, shape, operands())
    return measured(jax.jit(make()), operands(), work, settings, compare)


def _compared(shape: Cached, operands: tuple[Any, ...], found: Any) -> float:
    """The difference of all rows from the plain twin in float32."""
    import jax
    import jax.numpy as jnp

    *given, first, stop = operands
    wide = [array.astype(jnp.float32) for array in given]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(_named(shape, "plain"))(*wide, first, stop)
    return difference(found, expected)
