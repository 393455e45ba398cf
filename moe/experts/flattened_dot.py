"""Products with a weight whose columns are multiple axes, as gate and up side by side."""

import jax
from jaxtyping import Array, Float

from sharding.collectives import vary, varying


def flattened_dot(
    x: Float[Array, "token inner"], weights: Float[Array, "inner *outer"]
) -> Float[Array, "token columns"]:
    """``x @ W``, with the columns of ``W`` flattened in memory order.

    Weights are cast to the dtype of `x` where they are used. The gradient is that of autodiff, but
    the residual is the weight as it is passed. Otherwise a cast and reshaped copy would be saved in
    addition, in a scan over layers one for every layer.
    """
    axes = tuple(varying(x) | varying(weights))
    return _flattened_dot(*vary((x, weights), axes))


def _plain(x, weights):
    return x @ weights.astype(x.dtype).reshape(weights.shape[0], -1)


_flattened_dot = jax.custom_vjp(_plain)


def _forward(x, weights):
    return _plain(x, weights), (x, weights)


def _backward(residuals, gradient):
    # The product itself is not wanted here, and not computed.
    return jax.vjp(_plain, *residuals)[1](gradient)


_flattened_dot.defvjp(_forward, _backward)
