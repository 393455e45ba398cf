"""Stacks of layers: `lax.scan` over layers or over a period of layer types, or an unrolled loop.

The layers of a stack differ in their weights alone, or in type too: some have Gated DeltaNet
instead of attention, or a sliding window. If the order of types repeats, its period is a number of
layers, 1 if all have one type. Scanned, one period is compiled and runs repeatedly, so that compile
time does not grow with depth. Unrolled, each layer is compiled separately, which lets the compiler
optimise across layers, and no layer is sliced out of its stack at run time. The values are the same
up to rounding, as sums may be fused differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.architecture.delta import delta_layers as delta_layers_of
from moe.architecture.repetition import period_of
from moe.attention.mask import window_of_layer
from moe.config import ModelConfig
from moe.execution import Execution
from moe.weights import Layer, Transformer

Leaf = TypeVar("Leaf")
Carry = TypeVar("Carry")

MOST_UNROLLED = 8
"""Largest number of layers that is unrolled if `Execution.scan_layers` is None, and longest period
for which windows are static."""


def period_of_stack(config: ModelConfig, depth: int, first: int | None = 0) -> int:
    """Period of the layer types of a stack; its depth if their order does not repeat.

    Windows do not distinguish types if they are looked up at run time. That is so if their order
    does not repeat, if its period is longer than `MOST_UNROLLED` layers, as the loop body would
    take as long to compile as the unrolled layers, and in a pipeline stage.

    Args:
      first: index of its first layer in the network; None if it is known only at run time.
    """
    deltas = [index in delta_layers_of(config) for index in range(depth)]
    of_deltas = period_of(deltas)
    if first is None:
        return of_deltas
    windows = [window_of_layer(config, first + index) for index in range(depth)]
    period = period_of(list(zip(deltas, windows, strict=True)))
    # If the period of Gated DeltaNet is as long, static windows cost nothing.
    repeats = period <= max(MOST_UNROLLED, of_deltas) and 2 * period <= depth
    return period if repeats else of_deltas


def is_scanned(depth: int, execution: Execution, period: int = 1) -> bool:
    """True if a stack of `depth` layers is scanned.

    Args:
      period: `period_of_stack`.
    """
    if period > 1 and 2 * period > depth:
        return False
    if execution.scan_layers is None:
        return depth > MOST_UNROLLED
    return execution.scan_layers


def over_layers(
    run_layer: Callable[[int | Int[Array, ""], int, Layer[Array], Carry], tuple[Carry, Any]],
    layers: Layer[Array],
    carry: Carry,
    execution: Execution,
    period: int = 1,
    delta_layers: Sequence[int] = (),
) -> tuple[Carry, list[Any]]:
    """Runs `run_layer` on each layer of a stack in order.

    Args:
      run_layer: (index in the stack, index of a layer of its type, layer, carry) -> (carry, output
        of the layer).
      carry: of the same shapes and types before and after each layer.
      period: `period_of_stack`.
      delta_layers: indices of the layers with Gated DeltaNet.

    Returns:
      The last carry, and the outputs: an entry per layer or, if the stack is scanned, per layer of
      a period, with a dimension of periods in front.
    """
    depth = jax.tree.leaves(layers.norm)[0].shape[0]
    if not is_scanned(depth, execution, period):
        outs = []
        for number, layer in enumerate(_each(layers, delta_layers)):
            carry, out = run_layer(number, number, layer, carry)
            outs.append(out)
        return carry, outs
    if period == 1:

        def run_one(carry: Carry, given: Any) -> tuple[Carry, Any]:
            number, layer = given
            return run_layer(number, 0, layer, carry)

        numbered = jnp.arange(depth, dtype=jnp.int32), layers
        carry, out = lax.scan(run_one, carry, numbered)
        return carry, [out]
    number = depth // period
    of_period = [layer for layer in delta_layers if layer < period]

    def run_period(carry: Carry, given: Any) -> tuple[Carry, list[Any]]:
        first, own = given
        outs = []
        for place, layer in enumerate(_each(own, of_period)):
            carry, out = run_layer(first + place, place, layer, carry)
            outs.append(out)
        return carry, outs

    firsts = jnp.arange(0, depth, period, dtype=jnp.int32)
    # All periods have equally many layers of each type, so each leaf splits into equal parts.
    periods = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), layers)
    return lax.scan(run_period, carry, (firsts, periods))


def _each(layers: Layer[Array], delta_layers: Sequence[int]) -> list[Layer[Array]]:
    """Unstacks the layers of a stack."""
    if not delta_layers:
        return _apart(layers)
    # Gated DeltaNet is `attention` of those that have it.
    every = {field.name: getattr(layers, field.name) for field in fields(layers)}
    attention, delta = (iter(_apart(every.pop(kind))) for kind in ("attention", "delta"))
    return [
        Layer(next(delta if number in delta_layers else attention), **common)
        for number, common in enumerate(_apart(every))
    ]


def _apart(layers: Any) -> list[Any]:
    # One split: the gradient of the stack is then a concatenation of those of its layers, and not a
    # sum over layers of stacks that are zero elsewhere.
    leaves, structure = jax.tree.flatten(layers)
    cut = [lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
    return [
        structure.unflatten([lax.squeeze(part, [0]) for part in parts])
        for parts in zip(*cut, strict=True)
    ]


def of_kind(stack: Layer[Leaf], has_delta: bool) -> Layer[Leaf]:
    """Stack with the attention, or the Gated DeltaNet, of a stack with layers of both types."""
    if stack.delta is None:
        return stack
    return replace(stack, attention=stack.delta if has_delta else stack.attention, delta=None)


def layer_at(
    stack: Layer[Leaf],
    number: int,
    layer_of: Callable[[Leaf, int | slice], Leaf],
    delta_layers: Sequence[int] = (),
    period: int | None = None,
) -> Layer[Leaf]:
    """One layer of a stack, or the stack of all layers at one index in their periods.

    Args:
      number: index of the layer; with a period, its index in that.
      layer_of: (leaf of a stack, index or slice of indices) -> leaf of the layer or the layers.
      delta_layers: indices of the layers with Gated DeltaNet, which `delta` of the stack has.
      period: layers of a period; None is the layer alone.
    """
    has_delta, before = number in delta_layers, sum(layer < number for layer in delta_layers)
    own = of_kind(stack, has_delta)

    def cut(name: str) -> Any:
        at, step = number, period
        if name == "attention":
            at = before if has_delta else number - before
            if step is not None:
                of_delta = sum(layer < step for layer in delta_layers)
                step = of_delta if has_delta else step - of_delta
        places = at if step is None else slice(at, None, step)
        return jax.tree.map(lambda leaf: layer_of(leaf, places), getattr(own, name))

    return Layer(**{field.name: cut(field.name) for field in fields(own)})


def parts_of(weights: Transformer[Array], config: ModelConfig) -> tuple[Layer[Array], ...]:
    """Unstacks all layers into the parts that `over_layers` has an entry for: each layer by itself
    or, for a scanned stack, one stack for each index in its period."""
    return mapped_parts(weights, config, lambda stacked, number: stacked[number])


def mapped_parts(
    weights: Transformer[Leaf],
    config: ModelConfig,
    layer_of: Callable[[Leaf, int | slice], Leaf],
) -> tuple[Layer[Leaf], ...]:
    """`parts_of` for records of other leaves than arrays.

    Args:
      layer_of: as for `layer_at`.
    """
    parts, delta_layers = list[Layer[Leaf]](), delta_layers_of(config)
    for stack, first, depth in (
        (weights.first_layers, 0, config.num_dense_layers),
        (weights.layers, config.num_dense_layers, config.num_layers - config.num_dense_layers),
    ):
        if stack is None:
            continue
        period = period_of_stack(config, depth, first)
        if not is_scanned(depth, config.execution, period):
            parts += [layer_at(stack, number, layer_of, delta_layers) for number in range(depth)]
        elif period == 1:
            parts.append(stack)
        else:
            given = layer_of, delta_layers, period
            parts += [layer_at(stack, number, *given) for number in range(period)]
    return tuple(parts)


def runs_of(parts: Sequence[Layer[Leaf]], config: ModelConfig) -> list[tuple[Layer[Leaf], ...]]:
    """Groups `parts_of` into runs as they are computed: single layers, and all parts of a scanned
    stack."""
    runs, dense = list[tuple[Layer[Leaf], ...]](), config.num_dense_layers
    taken = first = 0
    while taken < len(parts):
        number = 1
        if is_stack(parts[taken]):
            depth = config.num_layers - first if first == dense else dense
            number = period_of_stack(config, depth, first)
        run = tuple(parts[taken : taken + number])
        runs.append(run)
        taken += number
        first += depth_of(run)
    return runs


def depth_of(run: Sequence[Layer[Any]]) -> int:
    """Number of layers in a run of parts."""
    return sum(part.norm.shape[0] if is_stack(part) else 1 for part in run)


def is_stack(part: Layer[Any]) -> bool:
    """True if a part is a stack of layers, of a scanned stack."""
    return part.norm.ndim > 1
