"""Load balancing of experts, by auxiliary losses, with the load fractions that they use, or instead
by a selection bias that favours idle experts."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.config import Model, ModelConfig
from moe.placement import stack_chunks
from moe.router.statistics import LoadFractions, RouterStatistics
from moe.tokens.sequences import load_fraction
from moe.weights import Transformer
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh


def load_fractions(
    sequence: Float[Array, "token route"] | None, load: Float[Array, "route"], model: Model
) -> LoadFractions:
    """The load fractions (``f_e`` of the papers) that the losses with a coefficient call for.

    What is counted are choices before dropping, padding left out, a prompt that several rows share
    once for each of them. Micro-batches that went before do not enter.

    Communication per device and layer: one `all_sum` of ``[route]`` numbers for each of the last
    two that has a coefficient.

    Args:
      sequence: the fractions within each token's sequence
        (`moe.tokens.sequences.sequence_load_fractions`); None if nothing is learned.
      load: choices of each expert by this device's tokens.
    """
    mesh = model.mesh
    everyone = (*mesh.dp, *mesh.sequence)
    return LoadFractions(
        sequence,
        load_fraction(all_sum(load, mesh.sequence)) if model.config.batch_balance_coef else None,
        load_fraction(all_sum(load, everyone)) if model.config.global_balance_coef else None,
    )


def compares_batches(config: ModelConfig) -> bool:
    """True if a loss uses the load of a whole micro-batch."""
    return bool(config.batch_balance_coef or config.global_balance_coef)


def merge_half_batches(
    half_stats: Sequence[RouterStatistics[Array]], model: Model
) -> RouterStatistics[Array]:
    """Sums over all tokens of a layer, from the sums of its half batches: a loss that uses the load
    of the micro-batch uses the load of both halves.

    Args:
      half_stats: statistics of tokens whose `PackedBatch.is_half_batch`.
    """
    choices = None
    if half_stats[0].choices is not None:
        choices = jnp.concatenate([x.choices for x in half_stats if x.choices is not None])
    sums = jax.tree.map(
        lambda *leaves: sum(leaves[1:], leaves[0]),
        *(replace(stats, choices=None) for stats in half_stats),
    )
    if sums.mass is None:
        return replace(sums, choices=choices)
    mass, compared = sums.mass, load_fractions(None, sums.load, model)

    def balance(fraction: Array | None, default: Array) -> Array:
        if fraction is None:
            return default
        return mass.shape[-1] * jnp.sum(jax.lax.stop_gradient(fraction) * mass)

    return replace(
        sums,
        batch_balance=balance(compared.batch, sums.batch_balance),
        global_balance=balance(compared.everywhere, sums.global_balance),
        mass=None,
        choices=choices,
    )


def router_loss(
    stats: RouterStatistics[Array] | None, model: Model, num_tokens: Int[Array, ""]
) -> Float[Array, ""]:
    """The router's losses, each times its coefficient, of the tokens of this sequence-parallel
    group: ``load_balance_coef balance + batch_balance_coef batch_balance + global_balance_coef
    global_balance + router_z_coef z``.

    Its sum over the other mesh axes and over micro-batches is the loss of the whole batch, a mean
    over tokens and layers.

    Args:
      stats: this device's sums; None without experts, where the loss is 0.
      num_tokens: valid tokens of the whole batch.
    """
    config = model.config
    if stats is None:
        return jnp.zeros((), jnp.float32)
    weighted = config.load_balance_coef * stats.balance + config.router_z_coef * stats.z
    weighted = weighted + config.batch_balance_coef * stats.batch_balance
    weighted = weighted + config.global_balance_coef * stats.global_balance
    tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    return all_sum(weighted, model.mesh.sequence) / (tokens * config.num_expert_layers)


def updated_bias(
    bias: Float[Array, "*layer route"], load: Float[Array, "*layer route"], rate: float
) -> Float[Array, "*layer route"]:
    """``b_e + rate sign(mean_e load - load_e)``: an idle expert is selected more, a busy one less.

    Args:
      bias: bias of each expert's selection.
      load: choices of each expert in the whole batch of an optimizer step, all devices and
        micro-batches, dropped ones included.
      rate: size of the step, in units of the score.

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
      rate: size of the step.
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
