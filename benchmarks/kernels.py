"""A part of `gpu.py`: the kernels of token dispatch beside their alternatives.

Each form is compared with float32 on fresh numbers before it is timed, as
``||out - reference|| / ||reference||``, and one that differs is a line that says by how much. Rates
stand beside what this device does with a large copy, measured here.

Bytes are those of the rows that are read and written: a gather reads a token for each of its slots,
a sum reads every slot and writes every token once.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu import Figures, measured, random

# Tokens, choices of each, experts, width: Qwen3-30B-A3B and DeepSeek-V3, a few thousand tokens.
DISPATCHES = ((32768, 8, 128, 2048), (8192, 8, 256, 7168))
SMALL_DISPATCHES = ((48, 2, 4, 128),)
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
