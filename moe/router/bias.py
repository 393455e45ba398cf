"""Auxiliary-loss-free load balancing: a selection bias that favours idle experts."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.placement import stack_chunks
from moe.weights import Transformer
from sharding.folding import FoldedMesh


def updated_bias(
    bias: Float[Array, "*layer route"], load: Float[Array, "*layer route"], rate: float
) -> Float[Array, "*layer route"]:
    """``b_e + rate sign(mean_e load - load_e)``: an idle expert is selected more, a busy one less.

    Args:
      bias: of each expert's selection.
      load: choices of each expert in the whole batch of an optimizer step, all devices and
        micro-batches, dropped ones included.
      rate: of the step, in units of the score.

    References:
      Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
      algorithm 1. https://arxiv.org/abs/2408.15664
    """
    # Times the number of experts: a quotient is rounded, and would move who has the mean.
    missing = jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load
    return bias + rate * jnp.sign(missing)


def with_updated_bias(
    before: Transformer[Array],
    after: Transformer[Array],
    load: Float[Array, "layer route"],
    rate: float,
    mesh: FoldedMesh,
) -> Transformer[Array]:
    """The weights after an optimizer step, their selection bias as `updated_bias` moves it.

    Args:
      before: the weights before the step, whose bias is used: the optimizer does not change it.
      after: the weights after the step.
      load: as for `updated_bias`, in the order of the layers.
      rate: of the step.
      mesh: on which the weights are stored.
    """
    old, new = before.layers.experts, after.layers.experts
    if old is None or new is None or old.bias is None:
        raise ValueError(
            "selection_bias=False has no bias to update: set it to True in the config."
        )
    # Stored in chunks, by other names of the same order.
    experts = replace(new, bias=updated_bias(old.bias, stack_chunks(mesh, load), rate))
    return replace(after, layers=replace(after.layers, experts=experts))
