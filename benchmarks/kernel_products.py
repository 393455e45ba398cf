"""Parts of `gpu.py`: the grouped product beside its alternatives, and cut in other ways.

As in `kernels.py` each is compared with float32 first, and rates stand beside that of a large
product, measured here.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu import Figures, measured, random
from kernel_cases import TILINGS
from kernels import ceilings, difference, timed

# Rows, inner, outer and groups: DeepSeek-V3's first product, Mixtral's, Qwen3-30B-A3B's.
PRODUCTS = ((131072, 7168, 1024, 256), (8192, 4096, 14336, 8), (262144, 2048, 768, 128))
SMALL_PRODUCTS = ((96, 64, 128, 3),)
Programs = dict[str, Callable[..., Any]]
"""What is timed, by name: each of rows, matrices, what pulls at the results, and sizes."""


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
