"""Gated activation between the two products of an expert, times the gate weight of each row."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.architecture.feed_forward import Activation, ClampedSwiGLU
from sharding.collectives import match_varying


def apply_activation(
    gate: Float[Array, "*row width"], up: Float[Array, "*row width"], activation: Activation
) -> Float[Array, "*row width"]:
    """``f(g) u``, in the dtype of both: SwiGLU, GEGLU or a `ClampedSwiGLU`.

    References:
      Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
    """
    if isinstance(activation, ClampedSwiGLU):
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(activation.alpha * gate))
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up


def apply_gate(
    gate_up: Float[Array, "row twice"],
    probs: Float[Array, "row"],
    activation: Activation = "silu",
) -> Float[Array, "row d_expert"]:
    """``f(g) * u * p`` for rows ``[g, u]``, in float32 and rounded to their dtype once.

    Its gradients are computed from its inputs alone, under every remat policy.

    Args:
      gate_up: gate/up projection of each row, gate and up side by side.
      probs: gate weight of each row, float32.
    """
    return _apply_gate(*match_varying((gate_up, probs)), activation)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _apply_gate(gate_up, probs, activation):
    return _plain(gate_up, probs, activation)


def _plain(gate_up, probs, activation):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (apply_activation(gate, up, activation) * probs[:, None]).astype(gate_up.dtype)


def _forward(gate_up, probs, activation):
    return _apply_gate(gate_up, probs, activation), (gate_up, probs)


def _backward(activation, residuals, gradient):
    gate_up, probs = residuals
    if activation != "silu":
        # The forward result is not used here, so XLA removes its computation.
        return jax.vjp(partial(_plain, activation=activation), gate_up, probs)[1](gradient)
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gradient, slope = gradient.astype(jnp.float32), jax.nn.sigmoid(gate)
    silu = gate * slope
    grad_probs = jnp.sum(gradient * silu * up, axis=-1)
    gradient = gradient * probs[:, None]
    grad_gate = gradient * up * (slope + silu * (1 - slope))
    return jnp.concatenate([grad_gate, gradient * silu], axis=-1).astype(gate_up.dtype), grad_probs


_apply_gate.defvjp(_forward, _backward)
