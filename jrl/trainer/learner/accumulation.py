"""Gradient accumulation: gradients of micro-batches are summed in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jrl.trainer.learner.passes import scan_first
from moe.weights import Transformer
from sharding.collectives import Axes, vary
from sharding.reduction import Reduced

Mark = Callable[[Transformer[Array]], Transformer[Any]]
"""Function of all weights before the forward pass: the same, some of them replaced by a
`Reduced`."""
Loss = Callable[[Transformer[Array], Any, Mark], tuple[Array, Any]]
"""(trained weights, micro-batch, function of all weights before the forward pass) -> the loss of
the micro-batch and its metrics."""

STACKS = ("layers", "first_layers")
"""Fields of a network that contain layers."""


def accumulated(
    loss_of: Loss, own: Transformer[Array], micro_batches: Any, passes: Array | None, axes: Axes
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates loss and gradient of this device over micro-batches; returns these sums, and the
    metrics of each micro-batch.

    Args:
      own: trained weights, varying over `axes`, all those of the mesh.
      micro_batches: inputs ``[micro_batch, ...]``.
      passes: number of micro-batches to run, as in `scan_first`.
    """
    # In float32 whatever the weights are: a bfloat16 sum of hundreds would lose further addends.
    # The carry varies over every axis, as gradients do: a scan keeps the types of its carry.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), own)
    nothing = (jnp.zeros((), jnp.float32), vary(zeros, axes))

    def add_micro_batch(total, micro_batch):
        found, grads = jax.value_and_grad(loss_of, has_aux=True)(own, micro_batch, _as_they_are)
        (loss, metrics), (loss_before, before) = found, total
        summed = jax.tree.map(lambda total, x: total + x.astype(total.dtype), before, grads)
        return (loss_before + loss, summed), metrics

    (loss, grads), metrics = scan_first(add_micro_batch, nothing, micro_batches, passes)
    return loss, grads, metrics


def reduced_on_the_way(
    loss_of: Loss,
    own: Transformer[Array],
    reductions: Transformer[Any],
    micro_batches: Any,
    passes: Array | None,
    axes: Axes,
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates gradients as `accumulated`, and sums them over devices, overlapped with the
    backward pass: each layer's as soon as the last micro-batch has computed it.

    The last micro-batch is outside of the loop over the others, and compiled in addition. Sums are
    in the same order: the values are those of `accumulated`, except where the compiler fuses the
    last micro-batch differently and rounds once less.

    Args:
      reductions: a `sharding.reduction.Reduction` for each weight of `own`.
      passes: at least 1.
    """
    number = jax.tree.leaves(micro_batches)[0].shape[0]
    # None is an empty sum: the gradient of a single micro-batch is not added to zeros.
    loss, total, metrics = jnp.zeros((), jnp.float32), jax.tree.map(lambda _: None, own), None
    if number > 1:
        others = jax.tree.map(lambda x: x[:-1], micro_batches)
        run = None if passes is None else passes - 1
        loss, total, metrics = accumulated(loss_of, own, others, run, axes)
    # The last micro-batch that runs: gradients are summed over devices once, when complete.
    place = number - 1 if passes is None else passes - 1
    last = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), micro_batches)
    ends = _without_stacks(own)
    places = jax.tree.map(lambda reduction, weight: reduction.sum_zeros(weight), reductions, own)
    places = {name: getattr(places, name) for name in STACKS}

    # Differentiated by the places, not by the layers: their cotangent is the sum over devices of
    # the layers' gradient (`sharding.reduction`).
    def last_loss(given):
        ends, places = given

        def mark(weights: Transformer[Array]) -> Transformer[Any]:
            stacks = {
                name: _marked(
                    getattr(reductions, name), getattr(weights, name), getattr(total, name), place
                )
                for name, place in places.items()
            }
            return replace(weights, **stacks)

        stacks = {name: getattr(own, name) for name in STACKS}
        return loss_of(replace(ends, **stacks), last, mark)

    (own_loss, found), (of_ends, of_stacks) = jax.value_and_grad(last_loss, has_aux=True)(
        (ends, places)
    )

    def reduced(reduction: Any, gradient: Array, before: Array | None) -> Array:
        # As `accumulated` does it: widened first, added, and then summed over devices.
        gradient = gradient.astype(jnp.float32)
        return reduction(gradient if before is None else before + gradient)

    grads = jax.tree.map(reduced, *map(_without_stacks, (reductions, of_ends, total)))
    metrics = jax.tree.map(
        lambda *given: _put(place, *given), found, *([] if metrics is None else [metrics])
    )
    return loss + own_loss, replace(grads, **of_stacks), metrics


def _as_they_are(weights: Transformer[Array]) -> Transformer[Array]:
    return weights


def _without_stacks(weights: Transformer[Any]) -> Transformer[Any]:
    """Weights with None in the place of every leaf of the layers."""
    nothing = {name: jax.tree.map(lambda _: None, getattr(weights, name)) for name in STACKS}
    return replace(weights, **nothing)


def _marked(reductions: Any, weights: Any, before: Any, places: Any) -> Any:
    """Stack of layers with a `Reduced` in the place of each trained weight."""

    def mark(reduction: Any, weight: Any, before: Any, place: Any) -> Any:
        return weight if reduction is None else Reduced(weight, before, place, reduction)

    given = reductions, weights, before, places
    return jax.tree.map(mark, *given, is_leaf=lambda leaf: leaf is None)


def _put(place: int | Array, last: Array, others: Array | None = None) -> Array:
    """Inserts the metric of the last micro-batch at `place` among those of the others, which are
    zeros from there on."""
    if others is None:
        return last[None]
    room = jnp.concatenate([others, jnp.zeros_like(others[:1])])
    return lax.dynamic_update_index_in_dim(room, last, place, 0)
