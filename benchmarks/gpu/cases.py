"""Every kernel at the awkward sizes of the tests' table, compared with float32 or with more;
nothing is timed.

On a CPU the kernels that can be interpreted are, at some of the sizes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.dispatch import MOVES, arrays_of, checked_move, program_of
from benchmarks.gpu.rows import Figures, Row, Settings, difference, kernel_forms, needs_gpu, random
from benchmarks.kernel_cases import (
    ATTENDED,
    CASES,
    COLUMNS,
    NARROW,
    PRODUCTS,
    ROUTED,
    ROUTES,
    RULES,
    Attended,
    Case,
    Columns,
    Narrow,
    Product,
    choices,
    marks,
)

SMALL = ("empty slots", "fewer rows than a tile", "sigmoid in groups", "windows", "segments")


def rows(settings: Settings) -> Iterator[Row]:
    """A row for each case: the worst difference of all that is computed at its sizes."""
    tables: tuple[tuple[str, dict[str, Any], Callable[..., Figures], bool], ...] = (
        ("dispatch", CASES, _dispatched, True),
        ("router", RULES, _routed, True),
        ("grouped", PRODUCTS, _multiplied, False),
        ("cached", COLUMNS, _attended, False),
        ("latent", NARROW, _attended_narrow, False),
        ("attention", ATTENDED, _trained, False),
    )
    for kernel, table, check, is_interpreted in tables:
        form = kernel_forms(settings)[-1] if is_interpreted else "mosaic"
        needs = needs_gpu() if form == "mosaic" else None
        for name, case in table.items():
            if not settings.small or name in SMALL:
                run = partial(check, settings, case, form)
                yield Row(f"cases/{kernel}/{name}", form, run, needs)


def _dispatched(settings: Settings, case: Case, form: str) -> Figures:
    """The layout, whose twin is equal, and all moves."""
    import jax

    from moe.kernels.layout import sorted_layout

    slots = int(case.room * case.tokens * case.k)
    ids = choices(case, settings.seed)

    def layout(which: str) -> Any:
        options = {"num_slots": slots, "implementation": which}
        return jax.jit(lambda ids: sorted_layout(ids, case.experts, **options))(ids)

    expected, found = layout("plain"), layout(form)
    if any((a != b).any() for a, b in zip(found, expected, strict=True)):
        raise ValueError("the layout differs from the reference implementation")
    arrays, worst = arrays_of(expected, case.width, settings), 0.0
    for move in MOVES:
        program, operands = program_of(arrays, move, form)
        worst = max(worst, checked_move(arrays, move)(program(*operands)))
    return {"difference": worst}


def _routed(settings: Settings, rule: dict[str, Any], form: str) -> Figures:
    """Choices and counts, which are the twin's, probs and probabilities."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.routing import Rule, route

    worst = 0.0
    for experts in ROUTES:
        logits = 3 * random(settings, 0, (ROUTED, experts), "float32")
        bias = 0.1 * random(settings, 1, (experts,), "float32")
        operands = logits, bias, jnp.arange(ROUTED, dtype=jnp.float32) % 3
        found, expected = (
            jax.jit(partial(route, rule=Rule(**rule), implementation=which))(*operands)
            for which in (form, "plain")
        )
        if (found.experts != expected.experts).any() or (found.counts != expected.counts).any():
            raise ValueError("expert ids or counts differ from the reference implementation")
        worst = max(worst, *map(difference, found[1:], expected[1:]))
    return {"difference": worst}


def _multiplied(settings: Settings, product: Product, form: str) -> Figures:
    """All three products; NaN in rows of no group."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.grouped import multiply_rows, sum_products

    known, groups = sum(product.sizes), len(product.sizes)
    wide = known + product.rest
    x, pull = (
        random(settings, at, (wide, width)).at[known:].set(jnp.nan)
        for at, width in enumerate((product.inner, product.outer))
    )
    weights = random(settings, 2, (groups, product.inner, product.outer))
    sizes = jnp.asarray(product.sizes, jnp.int32)
    programs: dict[str, Callable[[], Any]] = {
        "forward": lambda: jax.jit(partial(multiply_rows, 0))(x, weights, sizes),
        "rows": lambda: jax.jit(partial(multiply_rows, 1))(pull, weights, sizes),
        "matrices": lambda: jax.jit(sum_products)(x, pull, sizes),
    }
    expected = _looped(x, weights, pull, product.sizes)
    return {"difference": max(difference(run(), expected[name]) for name, run in programs.items())}


def _attended(settings: Settings, case: Columns, form: str) -> Figures:
    """NaN in the columns that a row does not see, and in all other layers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe.kernels.decode_attention import decode_attention

    number = len(case.first)
    first, stop = (jnp.asarray(ends, jnp.int32) for ends in (case.first, case.stop))
    column = jnp.arange(case.room)
    seen = (column >= first[:, None]) & (column < stop[:, None])
    query = random(settings, 0, (number, case.heads, case.head_dim))
    keys = random(settings, 1, (number, case.kv_heads, case.head_dim, case.room))
    values = random(settings, 2, (number, case.kv_heads, case.room, case.v_head_dim))
    hidden = (
        jnp.where(seen[:, None, None], keys, jnp.nan),
        jnp.where(seen[:, None, :, None], values, jnp.nan),
    )
    buffers = [jnp.stack([jnp.full_like(x, jnp.nan), x]) for x in hidden]
    attend = jax.jit(partial(decode_attention, layer=1, implementation=form))
    found = attend(query, *buffers, first, stop)

    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    grouped = query.reshape(number, case.kv_heads, -1, case.head_dim)
    scores = np.einsum("rvgk,rvkc->rvgc", grouped, keys) * case.head_dim**-0.5
    powers = np.where(seen[:, None, None], np.exp(scores), 0)
    out = np.einsum("rvgc,rvck->rvgk", powers, values) / powers.sum(axis=-1, keepdims=True)
    return {"difference": difference(found, out.reshape(found.shape))}


def _attended_narrow(settings: Settings, case: Narrow, form: str) -> Figures:
    """NaN where `_attended` has it, and several parts where the case says so."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe.kernels.latent_decode import split_latent_attention

    number, scale = len(case.first), case.width**-0.5
    first, stop = (jnp.asarray(ends, jnp.int32) for ends in (case.first, case.stop))
    column = jnp.arange(case.room)
    seen = (column >= first[:, None]) & (column < stop[:, None])
    query = random(settings, 0, (number, case.heads, case.width))
    vectors = random(settings, 1, (number, 1, case.width, case.room))
    hidden = jnp.where(seen[:, None, None], vectors, jnp.nan)
    fixed = {"rank": case.rank, "scale": scale, "length": case.length}
    attend = jax.jit(partial(split_latent_attention, **fixed))
    buffer = jnp.stack([jnp.full_like(hidden, jnp.nan), hidden])
    found = attend(query, buffer, first, stop, jnp.int32(1))

    query, vectors = (np.asarray(x, np.float64) for x in (query, vectors[:, 0]))
    powers = np.where(seen[:, None], np.exp(scale * query @ vectors), 0)
    values = np.swapaxes(vectors[:, : case.rank], 1, 2)
    return {"difference": difference(found, powers @ values / powers.sum(axis=-1, keepdims=True))}


def _trained(settings: Settings, case: Attended, form: str) -> Figures:
    """What queries get, and the gradients of all three; what queries that see nothing get is
    nobody's business."""
    import jax
    import jax.numpy as jnp

    from moe.attention.core import core_attention
    from moe.ops.mask import Mask, TokenIndices, visible

    keys = TokenIndices(*map(jnp.asarray, marks(case)))
    queries = TokenIndices(*(x[:, slice(*case.columns)] for x in keys))
    mask = Mask(queries, keys, case.window)
    rows, source = keys.column.shape
    time, heads = queries.column.shape[1], case.kv_heads * case.group
    sees = visible(queries, keys, case.window).any(axis=2)[..., None, None]
    query, key, value, pull = (
        random(settings, number, (rows, *shape))
        for number, shape in enumerate(
            (
                (time, heads, case.head_dim),
                (source, case.kv_heads, case.head_dim),
                (source, case.kv_heads, case.v_head_dim),
                (time, heads, case.v_head_dim),
            )
        )
    )

    def outcome(form, *given):
        attend = partial(core_attention, mask=mask, implementation=form)
        out, back = jax.vjp(lambda *given: jnp.where(sees, attend(*given), 0), *given)
        return out, *back(pull.astype(out.dtype))

    found = jax.jit(partial(outcome, form))(query, key, value)
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        expected = jax.jit(partial(outcome, "plain"))(*wide)
    return {"difference": max(map(difference, found, expected))}


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
