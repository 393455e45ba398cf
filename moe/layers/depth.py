"""Depth: the layers of a stack one after the other, as one program for all of them or unrolled.

The layers of a stack differ in their weights alone, or in kind too: some have Gated DeltaNet in the
place of attention, or a window. Kinds come in an order that repeats, and so many layers are a
period, one if all are alike. Scanned, a period is one program that runs over and over, so that what
is traced and compiled does not grow with depth. Unrolled, each layer is a program of its own, which
the compiler fits to what comes before and after it; no layer is cut out of its stack while the
program runs. The values are the same, but for the last digits of sums that are fused in another
way.
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
"""Layers of a stack up to which it is unrolled where `Execution.scan_layers` does not say, and of a
period up to which windows are known where it is compiled."""


def period_of_stack(config: ModelConfig, depth: int, first: int | None = 0) -> int:
    """How many layers of a stack are its period; all of them where their order does not repeat.

    Windows make no kind of layer where they are looked up while the program runs: where their order
    does not repeat, where it does so only after more than `MOST_UNROLLED` layers, for the body of
    the loop would take as long to compile as they unrolled, and in a stage of a pipeline.

    Args:
      first: the number of its first layer in the network; None where it is known at run time only.
    """
    deltas = [index in delta_layers_of(config) for index in range(depth)]
    of_deltas = period_of(deltas)
    if first is None:
        return of_deltas
    windows = [window_of_layer(config, first + index) for index in range(depth)]
    period = period_of(list(zip(deltas, windows, strict=True)))
    # Where Gated DeltaNet comes again no sooner, windows cost no layers.
    repeats = period <= max(MOST_UNROLLED, of_deltas) and 2 * period <= depth
    return period if repeats else of_deltas


def is_scanned(depth: int, execution: Execution, period: int = 1) -> bool:
    """Whether a stack of so many layers is run as one program for all.

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
    """`run_layer` on each layer of a stack in turn.

    Args:
      run_layer: (number in the stack, number of a layer of its kind, layer, carry) -> (carry, what
        comes out of the layer).
      carry: of the same shapes and types before and after each layer.
      period: `period_of_stack`.
      delta_layers: numbers of the layers with Gated DeltaNet.

    Returns:
      The last carry, and what came out: an entry per layer or, where the stack is scanned, per
      layer of a period, with a dimension of periods in front.
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
    # Of a kind there are equally many in all periods: each leaf is cut into as many parts.
    periods = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), layers)
    return lax.scan(run_period, carry, (firsts, periods))


def _each(layers: Layer[Array], delta_layers: Sequence[int]) -> list[Layer[Array]]:
    """Each layer of a stack by itself."""
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
    # Cut at once: the gradient of the stack is then that of its layers put together, and not the
    # sum over layers of stacks that are zero in all others.
    leaves, structure = jax.tree.flatten(layers)
    cut = [lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
    return [
        structure.unflatten([lax.squeeze(part, [0]) for part in parts])
        for parts in zip(*cut, strict=True)
    ]


def of_kind(stack: Layer[Leaf], has_delta: bool) -> Layer[Leaf]:
    """What a stack of layers of both kinds says of those of one kind."""
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
    """One layer of a stack, or a stack of all that stand in its place in their periods.

    Args:
      number: of the layer; where there are periods, in its own.
      layer_of: (leaf of a stack, number or those from one on in steps) -> that of the layer or
        the layers.
      delta_layers: numbers of the layers with Gated DeltaNet, of which `delta` of the stack is.
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
    """All layers in the parts that `over_layers` has an entry for: each layer by itself or, of a
    stack that is scanned, a stack of those in each place of its period."""
    return mapped_parts(weights, config, lambda stacked, number: stacked[number])


def mapped_parts(
    weights: Transformer[Leaf],
    config: ModelConfig,
    layer_of: Callable[[Leaf, int | slice], Leaf],
) -> tuple[Layer[Leaf], ...]:
    """`parts_of` records of other leaves than arrays.

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
    """`parts_of` in the runs that they are computed in: layers by themselves, one by one, and the
    parts of a stack that is scanned together."""
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
    """How many layers a run of parts has."""
    return sum(part.norm.shape[0] if is_stack(part) else 1 for part in run)


def is_stack(part: Layer[Any]) -> bool:
    """Whether a part is several layers, of a stack that is scanned."""
    return part.norm.ndim > 1
