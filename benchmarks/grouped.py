"""Times our grouped products beside `jax.lax.ragged_dot` and the batched einsum.

Rows ``[4096, 256]`` times a matrix ``[256, 512]`` per group, float32. The einsum takes the rows as
``[G, 4096 / G, 256]``: what equal groups, known when compiling, would cost. Values and gradients
are compared first; then all forms run in turn, round after round, and the least time of each is
printed. Compilation is left out.

    python benchmarks/grouped.py --threads 2
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPREADS = ("balanced", "Zipf", "all in one")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times grouped matrix products")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--shape", type=int, nargs=3, default=[4096, 256, 512])
    parser.add_argument("--smoke", action="store_true", help="a single run at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.shape, arguments.groups = 1, [64, 8, 16], [4]
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows, inner, outer = arguments.shape
    print(f"jax {jax.__version__}, [{rows}, {inner}] x [G, {inner}, {outer}] float32, ", end="")
    print(f"{arguments.threads} thread(s); ms, and with the gradient")
    print(f"{'G':>4} {'rows':12}{'form':12}{'forward':>9}{'both':>9}", end="")
    print(f"{'ragged_dot / it':>19}{'it / einsum':>18}")
    figures = []
    for groups in arguments.groups:
        figures += table(arguments.shape, groups, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def group_sizes(spread: str, rows: int, groups: int) -> list[int]:
    """Rows of each group: equal, falling as 1 / rank, or all in the middle one."""
    import numpy as np

    if spread == "balanced":
        return [rows // groups] * groups
    if spread == "all in one":
        return [rows if group == groups // 2 else 0 for group in range(groups)]
    share = 1 / np.arange(1, groups + 1)
    return np.random.default_rng(0).multinomial(rows, share / share.sum()).tolist()


def forms() -> dict[str, Callable[..., Any]]:
    """The same product in several forms, of rows, weights and group sizes."""
    from functools import partial

    import jax
    import jax.numpy as jnp

    from moe.experts.grouped_dot import grouped_dot

    def einsum(rows, weights, sizes):
        blocks = rows.reshape(weights.shape[0], -1, rows.shape[1])
        return jnp.einsum("gri,gio->gro", blocks, weights).reshape(rows.shape[0], -1)

    return {
        "einsum": einsum,
        "tiles": partial(grouped_dot, implementation="tiles"),
        "batched": partial(grouped_dot, implementation="batched"),
        "blocks": partial(grouped_dot, implementation="blocks"),
        "ragged_dot": jax.lax.ragged_dot,
    }


def with_gradient(form: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def both(rows, weights, pull, sizes):
        out, back = jax.vjp(lambda rows, weights: form(rows, weights, sizes), rows, weights)
        return out, *back(pull)

    return both


def table(shape: list[int], groups: int, rounds: int) -> list[dict[str, Any]]:
    """Compare, time and print the forms for one number of groups."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    draw = np.random.default_rng(0)
    rows, inner, outer = shape
    x, weights, pull = (
        jnp.asarray(draw.normal(size=size) / size[-1] ** 0.5, jnp.float32)
        for size in ((rows, inner), (groups, inner, outer), (rows, outer))
    )
    sizes = {s: jnp.asarray(group_sizes(s, rows, groups), jnp.int32) for s in SPREADS}
    calls, least = {}, {}
    for name, form in forms().items():
        forward, both = jax.jit(form), jax.jit(with_gradient(form))
        # The einsum is right for equal groups only, and costs the same for all.
        for spread in SPREADS if name != "einsum" else SPREADS[:1]:
            calls[spread, name, "forward"] = (forward, (x, weights, sizes[spread]))
            calls[spread, name, "both"] = (both, (x, weights, pull, sizes[spread]))
    for spread in SPREADS:
        program, operands = calls[spread, "ragged_dot", "both"]
        expected = program(*operands)
        for name in forms():
            if (spread, name, "both") in calls:
                compare(f"{name}, {spread}", calls[spread, name, "both"], expected)
    for program, operands in calls.values():
        jax.block_until_ready(program(*operands))
    for _ in range(rounds):
        for key, (program, operands) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            least[key] = min(least.get(key, float("inf")), 1e3 * (time.perf_counter() - start))
    return [line(groups, spread, name, least) for spread, name, part in calls if part == "both"]


def compare(what: str, call: tuple[Any, Any], expected: Any) -> None:
    import jax
    import numpy as np

    program, operands = call
    difference = max(
        float(np.max(np.abs(a - b)))
        for a, b in zip(jax.device_get(program(*operands)), expected, strict=True)
    )
    if not difference < 1e-3:
        raise SystemExit(f"{what} differs from ragged_dot by {difference:.2g}")


def line(groups: int, spread: str, name: str, least: dict[Any, float]) -> dict[str, Any]:
    """Print and return the figures of one form."""
    parts = ("forward", "both")
    forward, both = (least[spread, name, part] for part in parts)
    over = [least[spread, "ragged_dot", part] / least[spread, name, part] for part in parts]
    under = [least[spread, name, part] / least["balanced", "einsum", part] for part in parts]
    print(
        f"{groups:>4} {spread:12}{name:12}{forward:>9.2f}{both:>9.2f}"
        f"{over[0]:>10.1f}{over[1]:>9.1f}{under[0]:>10.2f}{under[1]:>8.2f}",
        flush=True,
    )
    return {"groups": groups, "spread": spread, "form": name, "forward": forward, "both": both}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
