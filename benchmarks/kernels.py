"""Parts of `gpu.py`: the kernels of token dispatch and the grouped product, beside alternatives.

Each form is compared with float32 on fresh numbers before it is timed, as
``||out - reference|| / ||reference||``, and one that differs is a line that says by how much. Rates
stand beside what this device does with a large copy or a large product, measured here.

Bytes are those of the rows that are read and written: a gather reads a token for each of its slots,
a sum reads every slot and writes every token once.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu import Figures, measured, random
from kernel_cases import TILINGS

# Tokens, choices of each, experts, width: Qwen3-30B-A3B and DeepSeek-V3, a few thousand tokens.
DISPATCHES = ((32768, 8, 128, 2048), (8192, 8, 256, 7168))
# Rows, inner, outer and groups: DeepSeek-V3's first product, Mixtral's, Qwen3-30B-A3B's.
PRODUCTS = ((131072, 7168, 1024, 256), (8192, 4096, 14336, 8), (262144, 2048, 768, 128))
SMALL_DISPATCHES, SMALL_PRODUCTS = ((48, 2, 4, 128),), ((96, 64, 128, 3),)
Programs = dict[str, Callable[..., Any]]
"""What is timed, by name: each of rows, matrices, what pulls at the results, and sizes."""
WORST = 1e-2
"""Relative difference from float32: half precision rounds to 4e-3."""


def ceilings(arguments: argparse.Namespace) -> tuple[float, float]:
    """Bytes and operations per second of this device: a large copy, a large product."""
    import jax

    elements, side = (2**10, 64) if arguments.smoke else (2**29, 8192)

    def copy():
        x, program = random((elements,)), jax.jit(lambda x: -x)
        return partial(program, x), lambda s: {"rate": 2 * x.nbytes / s}

    def product():
        x, y, program = random((side, side)), random((side, side), 1), jax.jit(lambda x, y: x @ y)
        return partial(program, x, y), lambda s: {"rate": 2 * side**3 / s}

    found = [measured("", build, arguments.calls) for build in (copy, product)]
    rates = [one.get("rate", float("nan")) for one in found]
    return rates[0], rates[1]


def difference(found: Any, expected: Any) -> float:
    """``||found - expected|| / ||expected||`` in float32; refused where it is too large."""
    import jax.numpy as jnp

    found, expected = (jnp.asarray(x, jnp.float32) for x in (found, expected))
    relative = float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
    # NaN is refused too.
    if not relative < WORST:
        raise ValueError(f"differs from float32 by {relative:.3g}")
    return relative


def timed(program: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, float]:
    """What a program gives when it is first called, and the seconds that took."""
    import jax

    began = time.perf_counter()
    found = jax.block_until_ready(program(*operands))
    return found, time.perf_counter() - began


def dispatch(arguments: argparse.Namespace) -> Iterator[Figures]:
    """`moe.kernels`: the router's choice, the layout, permute and unpermute with gradients."""
    by_copy, _ = ceilings(arguments)
    yield {"form": "a large copy", "gigabytes_per_s": by_copy / 1e9}
    for shape in SMALL_DISPATCHES if arguments.smoke else DISPATCHES:
        yield from _choosing(arguments, *shape[:3], by_copy)
        yield from _layouts(arguments, *shape[:3])
        for name, build in _moves(arguments, *shape, by_copy).items():
            yield measured(name, build, arguments.calls)


def kernel_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The implementations to compare: on a CPU the kernels are interpreted."""
    return ("plain", "interpreted" if arguments.smoke else "mosaic")


def _choices(tokens: int, k: int, experts: int) -> Any:
    import jax

    scores = jax.random.uniform(jax.random.key(5), (tokens, experts))
    return jax.lax.top_k(scores, k)[1]


def _choosing(
    arguments: argparse.Namespace, tokens: int, k: int, experts: int, by_copy: float
) -> Iterator[Figures]:
    """The router after its product: logits read once, probabilities written once."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.routing import Rule, route

    # The kernel takes a multiple of 8.
    experts = -(-experts // 8) * 8
    operands = random((tokens, experts), dtype="float32"), jnp.zeros(experts), jnp.ones(tokens)

    def build(name: str):
        compiled, plain = (
            jax.jit(partial(route, rule=Rule(k=k), implementation=which))
            for which in (name, "plain")
        )
        found, compiling = timed(compiled, operands)
        expected = plain(*operands)
        # Two numbers a rounding apart may change places, and few are.
        if not (found.experts != expected.experts).mean() < 1e-4:
            raise ValueError("chooses other experts than the plain twin")
        error = max(map(difference, found[1:], expected[1:]))
        moved_bytes = 8 * tokens * experts

        def meaning(seconds: float) -> Figures:
            rate = moved_bytes / seconds
            return {
                "gigabytes_per_s": rate / 1e9,
                "of_a_copy": rate / by_copy,
                "difference": error,
                "compiling_s": compiling,
            }

        return partial(compiled, *operands), meaning

    for name in kernel_names(arguments):
        form = f"router, {tokens} x {k} among {experts}, {name}"
        yield measured(form, partial(build, name), arguments.calls)


def _layouts(arguments: argparse.Namespace, tokens: int, k: int, experts: int) -> Iterator[Figures]:
    import jax

    from moe.experts.permutation import sort_by_group
    from moe.kernels.layout import sorted_layout

    ids = _choices(tokens, k, experts)

    def build(program: Callable[..., Any]):
        compiled = jax.jit(program)
        found, expected = compiled(ids), jax.jit(_sorted)(ids)
        if (found[: expected.shape[0]] != expected).any():
            raise ValueError("is not the stable order of the choices")
        return partial(compiled, ids), lambda s: {"choices_per_s": tokens * k / s}

    def _sorted(ids):
        return sort_by_group(ids.reshape(-1), experts)[0]

    form = f"layout of {tokens} x {k} among {experts}, "
    yield measured(form + "one sort", partial(build, _sorted), arguments.calls)
    for name in kernel_names(arguments):

        def choices(ids, name=name):
            return sorted_layout(ids, experts, implementation=name).choices

        yield measured(form + name, partial(build, choices), arguments.calls)


def _moves(
    arguments: argparse.Namespace, tokens: int, k: int, experts: int, width: int, by_copy: float
) -> dict[str, Callable[[], Any]]:
    """What is timed at one shape: a program, its reference in float32, and the rows it moves."""
    import jax
    import jax.numpy as jnp

    from moe.kernels.layout import sorted_layout
    from moe.kernels.permute import permute, unpermute

    layout = jax.jit(lambda ids: sorted_layout(ids, experts, implementation="plain"))(
        _choices(tokens, k, experts)
    )
    slots = tokens * k
    x, pull = random((tokens, width)), random((tokens, width), 1)
    rows, row_pull = random((slots, width), 2), random((slots, width), 3)
    probs = jax.random.uniform(jax.random.key(4), (tokens, k))

    def taken(x):
        return x.at[layout.tokens].get(mode="fill", fill_value=0)

    def scattered(rows, probs):
        """What one writes first: a sum by scattering and adding."""
        choice = jnp.minimum(layout.choices, slots - 1)
        terms = probs.reshape(-1)[choice][:, None] * rows.astype(jnp.float32)
        return jnp.zeros((tokens, width)).at[layout.tokens].add(terms, mode="drop")

    def gradient(function, *operands, of):
        return jax.vjp(function, *operands)[1](of)

    def named(name):
        there = partial(permute, layout=layout, implementation=name)

        def home(rows, probs):
            return unpermute(rows, layout, probs, implementation=name)

        return {
            "permute": (there, (x,)),
            "permute backward": (lambda x, of: gradient(there, x, of=of)[0], (x, row_pull)),
            "unpermute": (home, (rows, probs)),
            "unpermute backward": (
                lambda rows, probs, of: gradient(home, rows, probs, of=of),
                (rows, probs, pull),
            ),
        }

    by_xla = {
        "permute": (taken, (x,)),
        "permute backward": (lambda x, of: gradient(taken, x, of=of)[0], (x, row_pull)),
        "unpermute": (scattered, (rows, probs)),
        "unpermute backward": (
            lambda rows, probs, of: gradient(scattered, rows, probs, of=of.astype(jnp.float32)),
            (rows, probs, pull),
        ),
    }
    moved = {
        "permute": 2 * slots,
        "permute backward": slots + tokens,
        "unpermute": slots + tokens,
        "unpermute backward": 2 * slots + tokens,
    }

    def build(what, program, operands):
        compiled = jax.jit(program)
        wide = [operand.astype(jnp.float32) for operand in operands]
        expected = jax.tree.leaves(jax.jit(by_xla[what][0])(*wide))
        found, compiling = timed(compiled, operands)
        error = max(map(difference, jax.tree.leaves(found), expected))
        del expected, found, wide
        moved_bytes = moved[what] * width * x.dtype.itemsize

        def meaning(seconds: float) -> Figures:
            rate = moved_bytes / seconds
            return {
                "gigabytes_per_s": rate / 1e9,
                "of_a_copy": rate / by_copy,
                "difference": error,
                "compiling_s": compiling,
            }

        return partial(compiled, *operands), meaning

    forms = {"XLA gather and scatter": by_xla}
    forms |= {name: named(name) for name in kernel_names(arguments)}
    return {
        f"{what}, {tokens} x {k} x {width}, {name}": partial(build, what, *programs[what])
        for what in moved
        for name, programs in forms.items()
    }


def products(
    arguments: argparse.Namespace, of: Callable[[int], dict[str, Programs]] | None = None
) -> Iterator[Figures]:
    """Grouped products at published shapes: forward, gradient of the rows, of the matrices.

    Args:
      of: makes what is timed for a number of groups; `product_programs` unless given.
    """
    import jax.numpy as jnp
    from grouped import group_sizes

    _, by_product = ceilings(arguments)
    yield {"form": "a large product", "teraflops": by_product / 1e12}
    for rows, inner, outer, groups in SMALL_PRODUCTS if arguments.smoke else PRODUCTS:
        for spread in ("balanced",) if arguments.smoke or of else ("balanced", "Zipf"):
            sizes = jnp.asarray(group_sizes(spread, rows, groups), jnp.int32)
            operands = (
                random((rows, inner)),
                random((groups, inner, outer), 1),
                random((rows, outer), 2),
                sizes,
            )
            for name, programs in (of or product_programs)(groups).items():
                for part, build in _product_parts(programs, operands, by_product).items():
                    label = f"{name}, {rows} x {inner} x {outer} / {groups}, {spread}, {part}"
                    yield measured(label, build, arguments.calls)
            del operands


def tilings(arguments: argparse.Namespace) -> Iterator[Figures]:
    """The grouped product's kernels, cut in other ways."""
    yield from products(arguments, tiled_programs)


def product_programs(groups: int) -> dict[str, Programs]:
    """Grouped products; of other libraries those that are installed."""
    import jax

    from moe.experts.grouped.dot import grouped_dot

    forms: dict[str, Callable[..., Any]] = {
        name: partial(grouped_dot, implementation=name)
        for name in ("mosaic", "ragged_dot", "blocks")
    }
    forms["jax.lax.ragged_dot"] = jax.lax.ragged_dot
    try:
        import tokamax  # pyright: ignore[reportMissingImports]

        forms["tokamax"] = tokamax.ragged_dot
    except ImportError:
        pass
    programs = {name: _with_gradients(form) for name, form in forms.items()}
    # It looks through a list of all groups in every tile.
    return programs | (_shipped() if groups <= 32 else {})


def _with_gradients(form: Callable[..., Any]) -> Programs:
    import jax

    def forward(x, weights, pull, sizes):
        return form(x, weights, sizes)

    def of_rows(x, weights, pull, sizes):
        return jax.vjp(lambda x: form(x, weights, sizes), x)[1](pull)[0]

    def of_matrices(x, weights, pull, sizes):
        return jax.vjp(lambda weights: form(x, weights, sizes), weights)[1](pull)[0]

    return {"forward": forward, "rows": of_rows, "matrices": of_matrices}


def tiled_programs(groups: int) -> dict[str, Programs]:
    """Other ways to cut what "mosaic" computes."""
    from moe.kernels.grouped import Tiling, each, summed

    def programs(tiling: Tiling) -> Programs:
        return {
            "forward": lambda x, w, pull, sizes: each(0, x, w, sizes, tiling=tiling),
            "rows": lambda x, w, pull, sizes: each(1, pull, w, sizes, tiling=tiling),
            "matrices": lambda x, w, pull, sizes: summed(x, pull, sizes, tiling=tiling),
        }

    tilings = [Tiling()._replace(**changed) for changed in TILINGS]
    return {
        f"mosaic {t.rows} x {t.columns} x {t.depth} {t.stages} stages {t.wide} wide": programs(t)
        for t in tilings
    }


def _shipped() -> dict[str, Programs]:
    """The reference kernels that come with JAX."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    cut: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "grid_block_n": 1}
    cut["max_concurrent_steps"] = 4
    each, summed = ragged_dot_mgpu.ragged_dot, transposed_ragged_dot_mgpu.transposed_ragged_dot
    return {
        "jax's kernel": {
            "forward": lambda x, w, pull, sizes: each(x, w, group_sizes=sizes, **cut),
            "rows": lambda x, w, pull, sizes: each(
                pull, w, group_sizes=sizes, transpose_rhs=True, **cut
            ),
            "matrices": lambda x, w, pull, sizes: summed(x, pull, group_sizes=sizes, **cut),
        }
    }


def _product_parts(
    programs: Programs, operands: tuple[Any, ...], by_product: float
) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, weights, pull, sizes = operands
    (rows, inner), outer = x.shape, weights.shape[2]
    flops = 2 * rows * inner * outer
    # Rows from everywhere, and one group: a reference of all would not fit.
    some = np.sort(np.random.default_rng().choice(rows, min(rows, 64), replace=False))
    stop = np.cumsum(sizes)
    group = np.searchsorted(stop, some, "right")
    largest = int(np.argmax(sizes))
    mine = slice(int(stop[largest] - sizes[largest]), int(stop[largest]))
    exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def wide(array):
        return array.astype(jnp.float32)

    def expected(part):
        if part == "matrices":
            return exact("ri,ro->io", wide(x[mine]), wide(pull[mine]))
        given, formula = (x, "ri,rio->ro") if part == "forward" else (pull, "ro,rio->ri")
        few = [wide(given[some[at : at + 8]]) for at in range(0, len(some), 8)]
        of = [wide(weights[group[at : at + 8]]) for at in range(0, len(some), 8)]
        return jnp.concatenate([exact(formula, *both) for both in zip(few, of, strict=True)])

    def build(part, program):
        compiled = jax.jit(program)
        found, compiling = timed(compiled, operands)
        error = difference(found[largest if part == "matrices" else some], expected(part))
        del found

        def meaning(seconds: float) -> Figures:
            rate = flops / seconds
            return {
                "teraflops": rate / 1e12,
                "of_a_product": rate / by_product,
                "difference": error,
                "compiling_s": compiling,
            }

        return partial(compiled, *operands), meaning

    return {part: partial(build, part, program) for part, program in programs.items()}
