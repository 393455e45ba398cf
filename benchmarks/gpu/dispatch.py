"""The kernels of token dispatch: permute and unpermute with gradients, layouts, the router.

Bytes are those of the rows that are read and written: a gather reads a token for each of its slots,
a sum reads every slot and writes every token once. Another kernel is another entry of `PARTS`.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from benchmarks.gpu.rows import (
    Figures,
    Row,
    Settings,
    Work,
    difference,
    kernel_forms,
    measured,
    needs_gpu,
    random,
)
from benchmarks.gpu.shapes import DISPATCHES, SMALL_DISPATCHES, Dispatch

XLA = "gather and scatter"


class Arrays(NamedTuple):
    """What is moved: a layout, tokens and rows in its slots, and what pulls at both."""

    layout: Any
    x: Any
    pull: Any
    rows: Any
    row_pull: Any


class Move(NamedTuple):
    """A pass of permute or unpermute.

    Attributes:
      program: of a form; its operands are the layout and those named.
      operands: their names in `Arrays`.
      moved: rows read and written, of the numbers of slots and tokens.
    """

    program: Callable[[str], Callable[..., Any]]
    operands: tuple[str, ...]
    moved: Callable[[int, int], int]


def _there(form: str) -> Callable[..., Any]:
    from moe.experts.permutation import permute_rows

    def gathered(layout, x):
        return x.at[layout.tokens].get(mode="fill", fill_value=0)

    def permuted(layout, x):
        return permute_rows(x, layout.tokens, layout.slots, implementation=form)

    return gathered if form == XLA else permuted


def _home(form: str) -> Callable[..., Any]:
    import jax.numpy as jnp

    from moe.experts.permutation import unpermute_rows

    def scattered(layout, rows):
        """What one writes first: a sum by scattering and adding."""
        nothing = jnp.zeros((layout.slots.shape[0], rows.shape[1]))
        sums = nothing.at[layout.tokens].add(rows.astype(jnp.float32), mode="drop")
        return sums.astype(rows.dtype)

    def unpermuted(layout, rows):
        return unpermute_rows(rows, layout.slots, layout.tokens, form).astype(rows.dtype)

    return scattered if form == XLA else unpermuted


def _back(of: Callable[[str], Callable[..., Any]], form: str) -> Callable[..., Any]:
    import jax

    def gradients(layout, *operands):
        *given, pull = operands
        return jax.vjp(partial(of(form), layout), *given)[1](pull)

    return gradients


MOVES = {
    "permute": Move(_there, ("x",), lambda slots, tokens: 2 * slots),
    "permute backward": Move(
        partial(_back, _there), ("x", "row_pull"), lambda slots, tokens: slots + tokens
    ),
    "unpermute": Move(_home, ("rows",), lambda slots, tokens: slots + tokens),
    "unpermute backward": Move(
        partial(_back, _home), ("rows", "pull"), lambda slots, tokens: 2 * slots
    ),
}


def rows(settings: Settings) -> Iterator[Row]:
    """Every part at every shape."""
    for name, shape in (SMALL_DISPATCHES if settings.small else DISPATCHES).items():
        for part in PARTS:
            yield from part(name, shape, settings)


def moves(name: str, shape: Dispatch, settings: Settings) -> Iterator[Row]:
    """Permute and unpermute, forward and backward."""
    import jax

    from moe.kernels.layout import sorted_layout

    @cache
    def arrays() -> Arrays:
        layout = jax.jit(partial(sorted_layout, num_experts=shape.experts))(ids_of(shape, settings))
        return arrays_of(layout, shape.width, settings)

    for move in MOVES:
        for form in (*kernel_forms(settings), XLA):
            run = partial(_moved, settings, arrays, move, form)
            yield Row(f"dispatch/{name}/{move}", form, run, _needs(form))


def arrays_of(layout: Any, width: int, settings: Settings) -> Arrays:
    """Operands of all moves, fresh."""
    slots, tokens = layout.assignments.shape[0], layout.slots.shape[0]
    heights = (tokens, tokens, slots, slots)
    return Arrays(
        layout, *(random(settings, at, (height, width)) for at, height in enumerate(heights))
    )


def checked_move(arrays: Arrays, move: str) -> Callable[[Any], float]:
    """What compares a result with the same of float32 operands, gathered and scattered."""
    import jax
    import jax.numpy as jnp

    def compare(found):
        program, (layout, *operands) = program_of(arrays, move, XLA)
        wide = [operand.astype(jnp.float32) for operand in operands]
        expected = jax.tree.leaves(program(layout, *wide))
        return max(map(difference, jax.tree.leaves(found), expected))

    return compare


def program_of(arrays: Arrays, move: str, form: str) -> tuple[Callable[..., Any], list[Any]]:
    """A move by a form, and its operands."""
    import jax

    operands = [getattr(arrays, name) for name in MOVES[move].operands]
    return jax.jit(MOVES[move].program(form)), [arrays.layout, *operands]


def _moved(settings: Settings, arrays: Callable[[], Arrays], move: str, form: str) -> Figures:
    given = arrays()
    program, operands = program_of(given, move, form)
    slots, (tokens, _) = given.layout.assignments.shape[0], given.layout.slots.shape
    number = MOVES[move].moved(slots, tokens) * given.x.shape[1] * given.x.dtype.itemsize
    compare = checked_move(given, move)
    return measured(program, operands, Work(number, "bytes"), settings, compare)


def _needs(form: str) -> str | None:
    return needs_gpu() if form == "mosaic" else None


def ids_of(shape: Dispatch, settings: Settings) -> Any:
    """Experts that tokens choose at random."""
    import jax

    scores = random(settings, 5, (shape.tokens, shape.experts), "float32")
    return jax.lax.top_k(scores, shape.k)[1]


def layouts(name: str, shape: Dispatch, settings: Settings) -> Iterator[Row]:
    """From choices to the sorted layout. Bytes: ids read, choices and places written."""
    import jax

    from moe.kernels.layout import sorted_layout
    from moe.ops.sorting import sort_by_group

    ids = cache(partial(ids_of, shape, settings))

    def sorted_once(ids):
        return sort_by_group(ids.reshape(-1), shape.experts)[0]

    def run(form: str) -> Figures:
        def layout(ids):
            return sorted_layout(ids, shape.experts, implementation=form)

        program = sorted_once if form == "one sort" else layout

        def compare(found):
            choices = found if form == "one sort" else found.assignments
            if (choices[: ids().size] != jax.jit(sorted_once)(ids())).any():
                raise ValueError("is not the stable order of the expert ids")
            return 0.0

        work = Work(3 * ids().nbytes, "bytes")
        return measured(jax.jit(program), (ids(),), work, settings, compare)

    for form in (*kernel_forms(settings), "one sort"):
        yield Row(f"dispatch/{name}/layout", form, partial(run, form), _needs(form))


def rules_of(shape: Dispatch) -> dict[str, dict[str, Any]]:
    """How tokens choose, as fields of `moe.kernels.routing.Rule`: Qwen3's way, and DeepSeek-V3's
    without groups of experts and with them."""
    groups = 8 if shape.experts >= 64 else 4
    sigmoid = {"k": shape.k, "sigmoid": True, "scaling": 2.5}
    return {
        "router": {"k": shape.k},
        "router, sigmoid": sigmoid,
        "router, sigmoid in groups": sigmoid | {"groups": groups, "open_groups": groups // 2},
    }


def routers(name: str, shape: Dispatch, settings: Settings) -> Iterator[Row]:
    """The router after its product. Bytes: logits read, probabilities written."""
    for router, rule in rules_of(shape).items():
        for form in kernel_forms(settings):
            run = partial(_routed, settings, shape, rule, form)
            yield Row(f"dispatch/{name}/{router}", form, run, _needs(form))


def _routed(settings: Settings, shape: Dispatch, rule: dict[str, Any], form: str) -> Figures:
    import jax
    import jax.numpy as jnp

    from moe.kernels.routing import Rule, route

    logits = random(settings, 6, (shape.tokens, shape.experts), "float32")
    bias = 0.1 * random(settings, 7, (shape.experts,), "float32")
    bias = bias if "sigmoid" in rule else jnp.zeros(shape.experts)
    operands = logits, bias, jnp.ones(shape.tokens)
    program, plain = (
        jax.jit(partial(route, rule=Rule(**rule), implementation=which))
        for which in (form, "plain")
    )

    def compare(found):
        expected = plain(*operands)
        # Two numbers a rounding apart may change places, and few are.
        if not (found.experts != expected.experts).mean() < 1e-4:
            raise ValueError("expert ids differ from the reference implementation")
        return max(map(difference, found[1:], expected[1:]))

    return measured(program, operands, Work(2 * logits.nbytes, "bytes"), settings, compare)


PARTS = (moves, layouts, routers)
