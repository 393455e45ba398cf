"""Programs that make records of arrays, some fields of which are None."""

from collections.abc import Callable
from typing import Any

import jax


def making(make: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """`make`, compiled, its result laid out by `shardings`, a record of the same structure.

    What the program itself gives is a list: JAX would fill the fields that are None with a marker,
    which no record can hold.
    """
    places, structure = jax.tree.flatten(shardings)
    program = jax.jit(lambda *given: jax.tree.leaves(make(*given)), out_shardings=places)
    return lambda *given: structure.unflatten(program(*given))
