"""PyTorch's grouped product on what `benchmarks.gpu.grouped` is given, under the same names, even
groups and uneven ones.

In a process without JAX, which would have taken the device's memory.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

from benchmarks.gpu.grouped import PASSES, SPREADS, missing
from benchmarks.gpu.rows import SECONDS, WORST, Figures, Row, Settings, Work
from benchmarks.gpu.shapes import PRODUCTS, SMALL_PRODUCTS, Product
from benchmarks.grouped import group_sizes

FORM = "torch"


def rows(settings: Settings) -> Iterator[Row]:
    """Forward, gradient of the rows, of the matrices."""
    shapes = SMALL_PRODUCTS if settings.small else PRODUCTS
    for (part, spread), (name, shape) in product(SPREADS.items(), shapes.items()):
        operands = cache(partial(operands_of, settings, shape, spread))
        for which in PASSES:
            run = partial(_product, settings, operands, which)
            yield Row(f"{part}/{name}/{which}", FORM, run, _needs(settings))


def _needs(settings: Settings) -> str | None:
    needs = missing(FORM)
    if needs is None and not settings.small:
        import torch

        needs = None if torch.cuda.is_available() else "a PyTorch with CUDA"
    return needs


def operands_of(settings: Settings, shape: Product, spread: str) -> tuple[Any, ...]:
    """Rows, matrices, what pulls at the results, and where each group ends."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(settings.seed)

    def random(*sizes: int) -> Any:
        return torch.randn(sizes, generator=draw, device=device, dtype=torch.bfloat16)

    sizes = torch.tensor(group_sizes(spread, shape.rows, shape.groups), device=device)
    return (
        random(shape.rows, shape.inner),
        random(shape.groups, shape.inner, shape.outer),
        random(shape.rows, shape.outer),
        torch.cumsum(sizes, 0).to(torch.int32),
    )


def _grouped_mm() -> Callable[..., Any]:
    """It has a public name in newer versions."""
    import torch

    public = getattr(torch.nn.functional, "grouped_mm", None)
    return torch._grouped_mm if public is None else public


def _product(settings: Settings, operands: Callable[[], Any], which: str) -> Figures:
    x, weights, pull, stop = operands()
    grouped_mm = _grouped_mm()
    call = {
        "forward": lambda: grouped_mm(x, weights, offs=stop),
        "rows": lambda: grouped_mm(pull, weights.transpose(1, 2), offs=stop),
        "matrices": lambda: grouped_mm(x.t(), pull, offs=stop),
    }[which]
    began = time.perf_counter()
    found = call()
    _wait()
    figures: Figures = {"compile_s": time.perf_counter() - began}
    figures["difference"] = _compared(which, x, weights, pull, stop, found)
    del found
    seconds = _seconds_of(call, settings)
    work = Work(2 * x.shape[0] * x.shape[1] * pull.shape[1], "operations")
    return {"milliseconds": 1e3 * seconds, **work.rate(seconds, settings), **figures}


def _compared(which: str, x: Any, weights: Any, pull: Any, stop: Any, found: Any) -> float:
    """The difference from float32 of the rows, or of the matrix, of the largest group."""
    import torch

    # TF32 is off by default: these products are of float32.
    sizes = torch.diff(stop, prepend=torch.zeros_like(stop[:1]))
    group = int(sizes.argmax())
    mine = slice(int(stop[group] - sizes[group]), int(stop[group]))
    matrix, given, pulled = (t.float() for t in (weights[group], x[mine], pull[mine]))
    found, expected = {
        "forward": lambda: (found[mine], given @ matrix),
        "rows": lambda: (found[mine], pulled @ matrix.t()),
        "matrices": lambda: (found[group], given.t() @ pulled),
    }[which]()
    relative = float(torch.norm(found.float() - expected) / torch.norm(expected))
    if not relative < WORST:
        raise ValueError(f"differs from float32 by {relative:.3g}")
    return relative


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds_of(call: Callable[[], Any], settings: Settings) -> float:
    """As `benchmarks.gpu.rows.seconds_of`."""

    def calls(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            call()
        _wait()
        return (time.perf_counter() - began) / number

    calls(1)
    if settings.small:
        return calls(1)
    together = max(1, min(50, int(SECONDS / 5 / calls(2))))
    return statistics.median(calls(together) for _ in range(5))
