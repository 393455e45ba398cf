"""Depth: the layers of a stack one after the other, as one program for all of them or unrolled.

The layers of a stack differ in their weights alone. Scanned, they are one program that runs once a
layer, so that what is traced and compiled does not grow with depth. Unrolled, each is a program of
its own, which the compiler fits to what comes before and after it; no layer is cut out of its stack
while the program runs. The values are the same, but for the last digits of sums that are fused in
another way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.config import ModelConfig
from moe.execution import Execution
from moe.weights import Layer, Transformer

Leaf = TypeVar("Leaf")
Carry = TypeVar("Carry")

MOST_UNROLLED = 8
"""Layers of a stack up to which it is unrolled where `Execution.scan_layers` does not say."""


def is_scanned(depth: int, execution: Execution) -> bool:
    """Whether a stack of so many layers is run as one program for all."""
    if execution.scan_layers is None:
        return depth > MOST_UNROLLED
    return execution.scan_layers


def over_layers(
    run_layer: Callable[[int | Int[Array, ""], Layer[Array], Carry], tuple[Carry, Any]],
    layers: Layer[Array],
    carry: Carry,
    execution: Execution,
) -> tuple[Carry, list[Any]]:
    """`run_layer` on each layer of a stack in turn.

    Args:
      run_layer: (number in the stack, layer, carry) -> (carry, what comes out of the layer).
      carry: of the same shapes and types before and after each layer.

    Returns:
      The last carry, and what came out: an entry per layer or, where the stack is scanned, one
      with a dimension of layers in front.
    """
    depth = jax.tree.leaves(layers)[0].shape[0]
    if is_scanned(depth, execution):
        numbered = jnp.arange(depth, dtype=jnp.int32), layers
        carry, out = lax.scan(lambda carry, given: run_layer(*given, carry), carry, numbered)
        return carry, [out]
    # Cut at once: the gradient of the stack is then that of its layers put together, and not the
    # sum over layers of stacks that are zero in all others.
    leaves, structure = jax.tree.flatten(layers)
    cut, outs = [lax.split(leaf, [1] * depth) for leaf in leaves], []
    for number, parts in enumerate(zip(*cut, strict=True)):
        layer = structure.unflatten([lax.squeeze(part, [0]) for part in parts])
        carry, out = run_layer(number, layer, carry)
        outs.append(out)
    return carry, outs


def parts_of(weights: Transformer[Array], config: ModelConfig) -> tuple[Layer[Array], ...]:
    """All layers in the parts that `over_layers` has an entry for: each layer by itself, and a
    stack that is scanned as it is."""
    return mapped_parts(weights, config, lambda stacked, number: stacked[number])


def mapped_parts(
    weights: Transformer[Leaf],
    config: ModelConfig,
    layer_of: Callable[[Leaf, int], Leaf],
) -> tuple[Layer[Leaf], ...]:
    """`parts_of` records of other leaves than arrays.

    Args:
      layer_of: (leaf of a stack, number) -> that of the layer.
    """
    parts: list[Layer[Leaf]] = []
    dense = config.num_dense_layers
    for stack, depth in (
        (weights.first_layers, dense),
        (weights.layers, config.num_layers - dense),
    ):
        if stack is None:
            continue
        if is_scanned(depth, config.execution):
            parts.append(stack)
        else:
            parts += [
                jax.tree.map(lambda leaf, number=number: layer_of(leaf, number), stack)
                for number in range(depth)
            ]
    return tuple(parts)


def is_stack(layer: Layer[Any]) -> bool:
    """Whether a part is a stack that is scanned."""
    return layer.norm.ndim > 1
