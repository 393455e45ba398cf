"""Scan over a dynamic number of micro-batches, in one compiled function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sharding.collectives import vary


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

        # Both branches of a `cond` must have one type, which includes the axes a value varies over.
        def zeros(out: Any) -> Array:
            return vary(jnp.zeros(out.shape, out.dtype), tuple(out.manual_axis_type.varying))

        def skip(carry: Any, x: Any) -> tuple[Any, Any]:
            return carry, jax.tree.map(zeros, outs)

        return jax.lax.cond(index < passes, body, skip, carry, x)

    length = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), xs))
