"""How even the experts' load is made: what the losses compare with, and the bias of selection."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.config import ModelConfig
from moe.router.routing import Shares
from moe.weights import Transformer
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh


def shares(
    sequence: Float[Array, "token route"],
    load: Float[Array, "route"],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Shares:
    """The shares that the load-balancing losses with a weight call for.

    What is counted are choices before dropping, padding left out, a prompt that several rows share
    once for each of them:

    * `Shares.sequence`: those of the token's own sequence;
    * `Shares.batch`: those of one micro-batch in one sequence-parallel group (``cp x tp``), the
      rows that one ``dp`` rank holds;
    * `Shares.everywhere`: those of the same micro-batch on all devices (``dp x cp x tp``), which is
      the whole mini-batch when it is not cut into micro-batches. Micro-batches that went before do
      not enter.

    Communication per device and layer: one `all_sum` of ``[route]`` numbers for each of the last
    two that has a weight.

    Args:
      sequence: the share within each token's sequence.
      load: choices of each expert by this device's tokens.
    """
    everyone = (*mesh.dp, *mesh.sequence)
    return Shares(
        sequence,
        _share(all_sum(load, mesh.sequence)) if config.batch_balance_coef else None,
        _share(all_sum(load, everyone)) if config.global_balance_coef else None,
    )


def _share(load: Float[Array, "route"]) -> Float[Array, "route"]:
    return load / jnp.maximum(jnp.sum(load), 1.0)


def moved_bias(
    bias: Float[Array, "layer route"], load: Float[Array, "layer route"], rate: float
) -> Float[Array, "layer route"]:
    """``b_e + rate sign(mean_e load - load_e)``: an idle expert is selected more, a busy one less.

    Args:
      bias: of each expert's selection.
      load: choices of each expert in the whole batch of an optimiser step, all devices and
        micro-batches, dropped ones included.
      rate: of the step, in units of the score.

    References:
      Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
      algorithm 1. https://arxiv.org/abs/2408.15664
    """
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def rebalanced(
    before: Transformer[Array],
    after: Transformer[Array],
    load: Float[Array, "layer route"],
    rate: float,
) -> Transformer[Array]:
    """The weights after an optimiser step, their selection bias as `moved_bias` moves it.

    Args:
      before: the weights before the step, whose bias counts: the optimiser has no say in it.
      after: the weights after the step.
      load: as for `moved_bias`.
      rate: of the step.
    """
    old, new = before.layers.experts, after.layers.experts
    if old is None or new is None or old.bias is None:
        raise ValueError("selection_bias=False has no bias to move: set it in the configuration.")
    experts = replace(new, bias=moved_bias(old.bias, load, rate))
    return replace(after, layers=replace(after.layers, experts=experts))
