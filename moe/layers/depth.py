"""Depth: the layers of a stack one after the other, as one program for all of them or unrolled.

The layers of a stack differ in their weights alone, or some of them have Gated DeltaNet in the
place of attention: then they are unrolled. Scanned, they are one program that runs once a
layer, so that what is traced and compiled does not grow with depth. Unrolled, each is a program of
its own, which the compiler fits to what comes before and after it; no layer is cut out of its stack
while the program runs. The values are the same, but for the last digits of sums that are fused in
another way.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.architecture.delta import delta_layers as delta_layers_of
from moe.config import ModelConfig
from moe.execution import Execution
from moe.weights import Layer, Transformer

Leaf = TypeVar("Leaf")
Carry = TypeVar("Carry")

MOST_UNROLLED = 8
"""Layers of a stack up to which it is unrolled where `Execution.scan_layers` does not say."""


def is_scanned(depth: int, execution: Execution, delta_layers: Sequence[int] = ()) -> bool:
    """Whether a stack of so many layers is run as one program for all.

    Args:
      delta_layers: numbers of those with Gated DeltaNet.
    """
    if delta_layers:
        return False
    if execution.scan_layers is None:
        return depth > MOST_UNROLLED
    return execution.scan_layers


def over_layers(
    run_layer: Callable[[int | Int[Array, ""], Layer[Array], Carry], tuple[Carry, Any]],
    layers: Layer[Array],
    carry: Carry,
    execution: Execution,
    delta_layers: Sequence[int] = (),
) -> tuple[Carry, list[Any]]:
    """`run_layer` on each layer of a stack in turn.

    Args:
      run_layer: (number in the stack, layer, carry) -> (carry, what comes out of the layer).
      carry: of the same shapes and types before and after each layer.
      delta_layers: numbers of the layers with Gated DeltaNet.

    Returns:
      The last carry, and what came out: an entry per layer or, where the stack is scanned, one
      with a dimension of layers in front.
    """
    if delta_layers:
        apart = _apart_by_kind(layers, delta_layers)
    elif is_scanned(depth := jax.tree.leaves(layers)[0].shape[0], execution):
        numbered = jnp.arange(depth, dtype=jnp.int32), layers
        carry, out = lax.scan(lambda carry, given: run_layer(*given, carry), carry, numbered)
        return carry, [out]
    else:
        apart = _apart(layers)
    outs = []
    for number, layer in enumerate(apart):
        carry, out = run_layer(number, layer, carry)
        outs.append(out)
    return carry, outs


def _apart(layers: Any) -> list[Any]:
    """Each layer of a stack by itself."""
    # Cut at once: the gradient of the stack is then that of its layers put together, and not the
    # sum over layers of stacks that are zero in all others.
    leaves, structure = jax.tree.flatten(layers)
    cut = [lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
    return [
        structure.unflatten([lax.squeeze(part, [0]) for part in parts])
        for parts in zip(*cut, strict=True)
    ]


def _apart_by_kind(layers: Layer[Array], delta_layers: Sequence[int]) -> list[Layer[Array]]:
    """The same where some have Gated DeltaNet, which is `attention` of theirs."""
    every = {field.name: getattr(layers, field.name) for field in fields(layers)}
    attention, delta = (iter(_apart(every.pop(kind))) for kind in ("attention", "delta"))
    return [
        Layer(next(delta if number in delta_layers else attention), **common)
        for number, common in enumerate(_apart(every))
    ]


def of_kind(stack: Layer[Leaf], has_delta: bool) -> Layer[Leaf]:
    """What a stack of layers of both kinds says of those of one kind."""
    if stack.delta is None:
        return stack
    return replace(stack, attention=stack.delta if has_delta else stack.attention, delta=None)


def layer_at(
    stack: Layer[Leaf],
    number: int,
    layer_of: Callable[[Leaf, int], Leaf],
    delta_layers: Sequence[int] = (),
) -> Layer[Leaf]:
    """One layer of a stack.

    Args:
      layer_of: (leaf of a stack, number) -> that of the layer.
      delta_layers: numbers of the layers with Gated DeltaNet, of which `delta` of the stack is.
    """
    has_delta, before = number in delta_layers, sum(layer < number for layer in delta_layers)
    place = before if has_delta else number - before
    own = of_kind(stack, has_delta)

    def cut(name: str) -> Any:
        at = place if name == "attention" else number
        return jax.tree.map(lambda leaf: layer_of(leaf, at), getattr(own, name))

    return Layer(**{field.name: cut(field.name) for field in fields(own)})


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
    dense, delta_layers = config.num_dense_layers, delta_layers_of(config)
    for stack, depth in (
        (weights.first_layers, dense),
        (weights.layers, config.num_layers - dense),
    ):
        if stack is None:
            continue
        if is_scanned(depth, config.execution, delta_layers):
            parts.append(stack)
        else:
            parts += [layer_at(stack, number, layer_of, delta_layers) for number in range(depth)]
    return tuple(parts)


def is_stack(layer: Layer[Any]) -> bool:
    """Whether a part is a stack that is scanned."""
    return layer.norm.ndim > 1
