"""Compiled functions: a dynamic number of micro-batches, and recomputation after an overflow of the
expert buffers.

Under `moe.execution.Execution.buffer_factor` the buffers of the experts of a device hold a multiple
of the rows of even routing. A pass counts its overflow; if there is any, its result is discarded,
and the same pass is run with buffers for any routing. Both functions are compiled once, the second
when it is first needed. So only time and memory depend on the balance of the routing, and no result
does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe.router.statistics import run_with_fallback
from sharding.collectives import typed_zeros
from sharding.sharded_jit import MeshJit


class RetryOnOverflow:
    """Compiled pass without a gradient that is recomputed with dropless buffers on overflow; also a
    decorator. A call returns the result without the overflow.

    Args:
      function: the pass, ``(scorer, *args) -> (result, overflow)`` of a
        `jrl.trainer.scoring.Scorer`; `overflow` is that of `moe.router.statistics.overflow_of`.
      num_static: number of leading static arguments, the scorer first.
      least_effort: true for a pass that runs rarely on a few rows, see
        `sharding.compiler_options.LEAST_EFFORT`.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, Array | None]],
        num_static: int = 1,
        least_effort: bool = False,
    ):
        options: Any = {"static_argnums": tuple(range(num_static)), "least_effort": least_effort}
        self.with_overflow = MeshJit(function, **options)
        # Dropless buffers count no overflow: the second result is None.
        self.dropless = MeshJit(lambda *args: function(*args)[0], **options)
        self.__doc__ = function.__doc__

    def __call__(self, scorer: Any, *args: Any) -> Any:
        if scorer.config.execution.buffer_factor is None:
            return self.dropless(scorer, *args)
        result, _ = run_with_fallback(
            lambda: self.with_overflow(scorer, *args),
            lambda _: self.dropless(scorer.for_any_routing(), *args),
        )
        return result

    def lower(self, scorer: Any, *args: Any) -> Any:
        """Lowers the pass with dropless buffers."""
        return self.dropless.lower(scorer.for_any_routing(), *args)


def scan_first(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    passes: Int[Array, ""] | None,
) -> tuple[Any, Any]:
    """Runs the first `passes` iterations of a `jax.lax.scan`; the others keep the carry and return
    zeros. None runs all of them.

    The number is dynamic: skipped iterations cost nothing, and nothing is recompiled.

    Args:
      passes: the same on all devices, as `body` has collectives.
    """
    if passes is None:
        return jax.lax.scan(body, carry, xs)

    def step(carry: Any, indexed_x: tuple[Array, Any]) -> tuple[Any, Any]:
        index, x = indexed_x
        # Traced for its types only: skipped iterations must return zeros of the same types.
        _, outs = jax.eval_shape(body, carry, x)

        def skip(carry: Any, x: Any) -> tuple[Any, Any]:
            # Both branches of a `cond` must have one type.
            return carry, typed_zeros(outs)

        return jax.lax.cond(index < passes, body, skip, carry, x)

    length = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), xs))
