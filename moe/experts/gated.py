"""What lies between the two products of an expert: SwiGLU, and the weight of each row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.collectives import vary, varying


def gated(
    inward: Float[Array, "row twice"], probs: Float[Array, "row"]
) -> Float[Array, "row d_expert"]:
    """``silu(g) * u * p`` for rows ``[g, u]``, in float32 and rounded to their dtype once.

    Its gradients need what it is given and nothing that it computes, whatever is rematerialised.

    Args:
      inward: the first product of each row, gate and up side by side.
      probs: what the output of each row's expert counts by, float32.
    """
    axes = tuple(varying(inward) | varying(probs))
    return _gated(*vary((inward, probs), axes))


def _halves(inward: Array) -> list[Array]:
    return jnp.split(inward.astype(jnp.float32), 2, axis=-1)


@jax.custom_vjp
def _gated(inward, probs):
    gate, up = _halves(inward)
    return (jax.nn.silu(gate) * up * probs[:, None]).astype(inward.dtype)


def _forward(inward, probs):
    return _gated(inward, probs), (inward, probs)


def _backward(residuals, gradient):
    inward, probs = residuals
    gate, up = _halves(inward)
    gradient, slope = gradient.astype(jnp.float32), jax.nn.sigmoid(gate)
    silu = gate * slope
    by_probs = jnp.sum(gradient * silu * up, axis=-1)
    gradient = gradient * probs[:, None]
    by_gate = gradient * up * (slope + silu * (1 - slope))
    return jnp.concatenate([by_gate, gradient * silu], axis=-1).astype(inward.dtype), by_probs


_gated.defvjp(_forward, _backward)
