"""Gradient accumulation over micro-batches: the sums of this device, or those over devices, each
reduced as soon as the backward pass of the last micro-batch has computed it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.weights import Transformer, without_layers
from sharding.collectives import Axes, typed_zeros, vary
from sharding.zero import Reduced, Reduction

Loss = Callable[[Transformer[Any], Any], tuple[Array, Any]]
"""(trained weights, some of them in a `Reduced`, micro-batch) -> the loss of the micro-batch and
its metrics."""


def scan_first(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    passes: Int[Array, ""] | None,
) -> tuple[Any, Any]:
    """Runs the first `passes` iterations of a `jax.lax.scan`; the others keep the carry and return
    zeros. None runs all of them.

    The number is dynamic: skipped iterations cost nothing, and nothing is recompiled.

    Args:
      passes: the same on all devices, as `body` has collectives.
    """
    if passes is None:
        return jax.lax.scan(body, carry, xs)

    def step(carry: Any, indexed_x: tuple[Array, Any]) -> tuple[Any, Any]:
        index, x = indexed_x
        # Traced for its types only: skipped iterations must return zeros of the same types.
        _, outs = jax.eval_shape(body, carry, x)

        def skip(carry: Any, x: Any) -> tuple[Any, Any]:
            # Both branches of a `cond` must have one type.
            return carry, typed_zeros(outs)

        return jax.lax.cond(index < passes, body, skip, carry, x)

    length = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), xs))


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
      local_weights: trained weights, varying over `axes`, all axes of the mesh.
      micro_batches: inputs ``[micro_batch, ...]``.
      passes: number of micro-batches to run, as in `scan_first`.
    """
    # In float32 whatever the weights are: a bfloat16 sum of hundreds would lose further addends.
    # The carry varies over every axis, as gradients do: a scan keeps the types of its carry.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), local_weights)
    zero_sums = (jnp.zeros((), jnp.float32), vary(zeros, axes))

    def add_micro_batch(total, micro_batch):
        loss_before, grads_before = total
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(
            local_weights, micro_batch
        )
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
    in the same order: the values equal `accumulate_gradients`, unless the compiler fuses the last
    micro-batch differently and rounds once less.

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
    zeros = jax.tree.map(Reduction.sum_zeros, reductions, local_weights)

    def wrap(reduction: Reduction, weight: Array, before: Array | None, zeros: Array) -> Any:
        return Reduced(weight, before, zeros, reduction)

    # Differentiated by these zeros, not by the layers: their cotangent is the sum over devices of
    # the layers' gradient (`sharding.zero`).
    def last_loss(differentiated: Transformer[Array]) -> tuple[Array, Any]:
        wrapped = jax.tree.map(wrap, reductions, local_weights, total, differentiated)
        return loss_of(_with_layers(differentiated, wrapped), last)

    (last_value, last_metrics), grads = jax.value_and_grad(last_loss, has_aux=True)(
        _with_layers(local_weights, zeros)
    )

    def reduce_gradient(reduction: Reduction, gradient: Array, before: Array | None) -> Array:
        # As `accumulate_gradients` does it: widened first, added, and then summed over devices.
        gradient = gradient.astype(jnp.float32)
        return reduction(gradient if before is None else before + gradient)

    reduced = jax.tree.map(reduce_gradient, *map(without_layers, (reductions, grads, total)))
    if metrics is None:
        metrics = jax.tree.map(lambda x: x[None], last_metrics)
    else:
        metrics = jax.tree.map(partial(_insert_metric, last_index), metrics, last_metrics)
    return loss + last_value, _with_layers(reduced, grads), metrics


def _with_layers(weights: Transformer[Any], layers_of: Transformer[Any]) -> Transformer[Any]:
    """`weights` with the layers of another network."""
    return replace(weights, layers=layers_of.layers, first_layers=layers_of.first_layers)


def _insert_metric(index: int | Array, others: Array, last: Array) -> Array:
    """Inserts the metric of the last micro-batch at `index` among the others, zeros from there
    on."""
    padded = jnp.concatenate([others, jnp.zeros_like(others[:1])])
    return lax.dynamic_update_index_in_dim(padded, last, index, 0)
