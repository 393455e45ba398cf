"""Rows of the embedding: what tokens start from."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding.collectives import vary, varying


def lookup(
    table: Float[Array, "vocab d_model"], tokens: Int[Array, "token"]
) -> Float[Array, "token d_model"]:
    """``table[tokens]``, float32.

    The gradient of a row is the sum over the tokens that have its id, summed in float32 and rounded
    to the dtype of the table once: of a frequent token a sum in bfloat16 would stop growing.
    """
    table, tokens = vary((table, tokens), tuple(varying(table) | varying(tokens)))
    return _lookup(table, tokens, table.shape, table.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _forward(table, tokens, shape, dtype)[0]


def _forward(
    table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any
) -> tuple[Array, Array]:
    return table[tokens].astype(jnp.float32), tokens


def _backward(
    shape: tuple[int, ...], dtype: Any, tokens: Array, gradient: Array
) -> tuple[Array, None]:
    nothing = vary(jnp.zeros(shape, jnp.float32), tuple(varying(gradient)))
    return nothing.at[tokens].add(gradient).astype(dtype), None


_lookup.defvjp(_forward, _backward)
