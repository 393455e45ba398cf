"""As many micro-batches as there are: one program, however many of them it runs."""

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
    """`jax.lax.scan` that runs the first `passes` of its iterations, and for the others leaves the
    carry as it is and gives zeros; None runs all of them.

    The number is one of run time: what is left out costs nothing, and nothing is compiled anew.

    Args:
      passes: the same on all devices, which meet in the collectives of `body`.
    """
    if passes is None:
        return jax.lax.scan(body, carry, xs)

    def step(carry: Any, given: tuple[Array, Any]) -> tuple[Any, Any]:
        number, x = given
        # Traced for its types alone: what is skipped must give zeros of the same.
        _, outs = jax.eval_shape(body, carry, x)

        # Both branches of a `cond` must be of one type, which says over what axes a value varies.
        def zeros(out: Any) -> Array:
            return vary(jnp.zeros(out.shape, out.dtype), tuple(out.manual_axis_type.varying))

        def skip(carry: Any, x: Any) -> tuple[Any, Any]:
            return carry, jax.tree.map(zeros, outs)

        return jax.lax.cond(number < passes, body, skip, carry, x)

    length = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), xs))
