"""Gradient accumulation: gradients of micro-batches are summed in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jrl.trainer.compiled import scan_first
from moe.weights import Transformer, without_layers
from sharding.collectives import Axes, vary
from sharding.zero import Reduced

WrapWeights = Callable[[Transformer[Array]], Transformer[Any]]
"""Function of all weights before the forward pass: the same, some of them replaced by a
`Reduced`."""
Loss = Callable[[Transformer[Array], Any, WrapWeights], tuple[Array, Any]]
"""(trained weights, micro-batch, function of all weights before the forward pass) -> the loss of
the micro-batch and its metrics."""

LAYER_FIELDS = ("layers", "first_layers")
"""Fields of a network that contain layers."""


def accumulate_gradients(
    loss_of: Loss,
    local_weights: Transformer[Array],
    micro_batches: Any,
    passes: Array | None,
    axes: Axes,
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates loss and gradient of this device over micro-batches; returns these sums, and the
    metrics of each micro-batch.

    Args:
      local_weights: trained weights, varying over `axes`, all those of the mesh.
      micro_batches: inputs ``[micro_batch, ...]``.
      passes: number of micro-batches to run, as in `scan_first`.
    """
    # In float32 whatever the weights are: a bfloat16 sum of hundreds would lose further addends.
    # The carry varies over every axis, as gradients do: a scan keeps the types of its carry.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), local_weights)
    zero_sums = (jnp.zeros((), jnp.float32), vary(zeros, axes))

    def add_micro_batch(total, micro_batch):
        loss_and_metrics, grads = jax.value_and_grad(loss_of, has_aux=True)(
            local_weights, micro_batch, _unwrapped
        )
        (loss, metrics), (loss_before, grads_before) = loss_and_metrics, total
        summed = jax.tree.map(lambda total, x: total + x.astype(total.dtype), grads_before, grads)
        return (loss_before + loss, summed), metrics

    (loss, grads), metrics = scan_first(add_micro_batch, zero_sums, micro_batches, passes)
    return loss, grads, metrics


def accumulate_with_overlapped_reduction(
    loss_of: Loss,
    local_weights: Transformer[Array],
    reductions: Transformer[Any],
    micro_batches: Any,
    passes: Array | None,
    axes: Axes,
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates gradients as `accumulate_gradients`, and sums them over devices, overlapped with
    the backward pass: each layer's as soon as the last micro-batch has computed it.

    The last micro-batch is outside of the loop over the others, and compiled in addition. Sums are
    in the same order: the values are those of `accumulate_gradients`, except where the compiler
    fuses the last micro-batch differently and rounds once less.

    Args:
      reductions: a `sharding.zero.Reduction` for each weight of `local_weights`.
      passes: at least 1.
    """
    num_micro_batches = jax.tree.leaves(micro_batches)[0].shape[0]
    # None is an empty sum: the gradient of a single micro-batch is not added to zeros.
    loss = jnp.zeros((), jnp.float32)
    total = jax.tree.map(lambda _: None, local_weights)
    metrics = None
    if num_micro_batches > 1:
        other_micro_batches = jax.tree.map(lambda x: x[:-1], micro_batches)
        other_passes = None if passes is None else passes - 1
        loss, total, metrics = accumulate_gradients(
            loss_of, local_weights, other_micro_batches, other_passes, axes
        )
    # The last micro-batch that runs: gradients are summed over devices once, when complete.
    last_index = num_micro_batches - 1 if passes is None else passes - 1
    last = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, last_index, keepdims=False), micro_batches
    )
    outside_layers = without_layers(local_weights)
    zeros = jax.tree.map(
        lambda reduction, weight: reduction.sum_zeros(weight), reductions, local_weights
    )
    zeros = {name: getattr(zeros, name) for name in LAYER_FIELDS}

    # Differentiated by these zeros, not by the layers: their cotangent is the sum over devices of
    # the layers' gradient (`sharding.zero`).
    def last_loss(differentiated):
        outside_layers, zeros = differentiated

        def wrap_layers(weights: Transformer[Array]) -> Transformer[Any]:
            stacks = {
                name: _wrap_stack(
                    getattr(reductions, name),
                    getattr(weights, name),
                    getattr(total, name),
                    stack_zeros,
                )
                for name, stack_zeros in zeros.items()
            }
            return replace(weights, **stacks)

        stacks = {name: getattr(local_weights, name) for name in LAYER_FIELDS}
        return loss_of(replace(outside_layers, **stacks), last, wrap_layers)

    (last_value, last_metrics), (outer_grads, layer_grads) = jax.value_and_grad(
        last_loss, has_aux=True
    )((outside_layers, zeros))

    def reduce_gradient(reduction: Any, gradient: Array, before: Array | None) -> Array:
        # As `accumulate_gradients` does it: widened first, added, and then summed over devices.
        gradient = gradient.astype(jnp.float32)
        return reduction(gradient if before is None else before + gradient)

    grads = jax.tree.map(reduce_gradient, *map(without_layers, (reductions, outer_grads, total)))
    metrics = jax.tree.map(
        lambda *stacked: _insert_metric(last_index, *stacked),
        last_metrics,
        *([] if metrics is None else [metrics]),
    )
    return loss + last_value, replace(grads, **layer_grads), metrics


def _unwrapped(weights: Transformer[Array]) -> Transformer[Array]:
    return weights


def _wrap_stack(reductions: Any, weights: Any, before: Any, zeros: Any) -> Any:
    """Stack of layers with a `Reduced` instead of each trained weight."""

    def wrap(reduction: Any, weight: Any, before: Any, zero: Any) -> Any:
        return weight if reduction is None else Reduced(weight, before, zero, reduction)

    return jax.tree.map(wrap, reductions, weights, before, zeros, is_leaf=lambda leaf: leaf is None)


def _insert_metric(index: int | Array, last: Array, others: Array | None = None) -> Array:
    """Inserts the metric of the last micro-batch at `index` among those of the others, which are
    zeros from there on."""
    if others is None:
        return last[None]
    padded = jnp.concatenate([others, jnp.zeros_like(others[:1])])
    return lax.dynamic_update_index_in_dim(padded, last, index, 0)
