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

from moe.architecture.attention import delta_layers as delta_layers_of
from moe.architecture.attention import period_of
from moe.attention.layer import window_of_layer
from moe.config import ModelConfig
from moe.execution import Execution
from moe.weights import Layer, Transformer

Leaf = TypeVar("Leaf")
Carry = TypeVar("Carry")

MAX_UNROLLED = 8
"""Largest number of layers that is unrolled if `Execution.scan_layers` is None, and longest period
for which windows are static."""


def period_of_stack(config: ModelConfig, depth: int, first: int | None = 0) -> int:
    """Period of the layer types of a stack; its depth if their order does not repeat.

    Windows do not distinguish types if they are looked up at run time. That is so if their order
    does not repeat, if its period is longer than `MAX_UNROLLED` layers, as the loop body would
    take as long to compile as the unrolled layers, and in a pipeline stage.

    Args:
      first: index of its first layer in the network; None if it is known only at run time.
    """
    deltas = [index in delta_layers_of(config) for index in range(depth)]
    delta_period = period_of(deltas)
    if first is None:
        return delta_period
    windows = [window_of_layer(config, first + index) for index in range(depth)]
    period = period_of(list(zip(deltas, windows, strict=True)))
    # If the period of Gated DeltaNet is as long, static windows cost nothing.
    repeats = period <= max(MAX_UNROLLED, delta_period) and 2 * period <= depth
    return period if repeats else delta_period


def is_scanned(depth: int, execution: Execution, period: int = 1) -> bool:
    """True if a stack of `depth` layers is scanned.

    Args:
      period: `period_of_stack`.
    """
    if period > 1 and 2 * period > depth:
        return False
    if execution.scan_layers is None:
        return depth > MAX_UNROLLED
    return execution.scan_layers


def run_layers(
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
      carry: carry of the scan, with the same shapes and types before and after each layer.
      period: `period_of_stack`.
      delta_layers: indices of the layers with Gated DeltaNet.

    Returns:
      The last carry, and the outputs: one per layer or, if the stack is scanned, per layer of a
      period, with a dimension of periods in front.
    """

    def run_unrolled(
        carry: Carry, numbered: tuple[int | Array, Layer[Array]]
    ) -> tuple[Carry, list[Any]]:
        (first, stack), outs = numbered, []
        # The layer types of the first layers repeat, period after period.
        deltas = [layer for layer in delta_layers if layer < num_layers(stack)]
        for position, layer in enumerate(_unstack_layers(stack, deltas)):
            carry, out = run_layer(first + position, position, layer, carry)
            outs.append(out)
        return carry, outs

    def run_one(carry: Carry, numbered: Any) -> tuple[Carry, Any]:
        index, layer = numbered
        return run_layer(index, 0, layer, carry)

    depth = num_layers(layers)
    if not is_scanned(depth, execution, period):
        return run_unrolled(carry, (0, layers))
    if period == 1:
        numbered = jnp.arange(depth, dtype=jnp.int32), layers
        carry, out = lax.scan(run_one, carry, numbered)
        return carry, [out]
    starts = jnp.arange(0, depth, period, dtype=jnp.int32)
    # All periods have equally many layers of each type, so each leaf splits into equal shares.
    periods = jax.tree.map(lambda x: x.reshape(depth // period, -1, *x.shape[1:]), layers)
    return lax.scan(run_unrolled, carry, (starts, periods))


def num_layers(stack: Layer[Any]) -> int:
    """Number of layers of a stack, whose weights may be arrays or `sharding.zero.Reduced`."""
    return jax.tree.leaves(stack.norm)[0].shape[0]


def _unstack_layers(layers: Layer[Array], delta_layers: Sequence[int]) -> list[Layer[Array]]:
    """Unstacks the layers of a stack."""
    if not delta_layers:
        return _unstack(layers)
    # Gated DeltaNet is `attention` of those that have it.
    layer_fields = {field.name: getattr(layers, field.name) for field in fields(layers)}
    attention, delta = (iter(_unstack(layer_fields.pop(kind))) for kind in ("attention", "delta"))
    return [
        Layer(next(delta if index in delta_layers else attention), **shared_fields)
        for index, shared_fields in enumerate(_unstack(layer_fields))
    ]


def _unstack(layers: Any) -> list[Any]:
    # One split: the gradient of the stack is then a concatenation of its layers' gradients, and not
    # a sum over layers of stacks that are zero elsewhere.
    leaves, structure = jax.tree.flatten(layers)
    splits = [lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
    return [
        structure.unflatten([lax.squeeze(layer_leaf, [0]) for layer_leaf in layer_leaves])
        for layer_leaves in zip(*splits, strict=True)
    ]


def select_attention(stack: Layer[Leaf], has_delta: bool) -> Layer[Leaf]:
    """Stack with the attention, or the Gated DeltaNet, of a stack with layers of both types."""
    if stack.delta is None:
        return stack
    return replace(stack, attention=stack.delta if has_delta else stack.attention, delta=None)


def layer_at(
    stack: Layer[Leaf],
    index: int,
    layer_of: Callable[[Leaf, int | slice], Leaf],
    delta_layers: Sequence[int] = (),
    period: int | None = None,
) -> Layer[Leaf]:
    """One layer of a stack, or the stack of all layers at one index in their periods.

    Args:
      index: index of the layer; with a period, its index in that.
      layer_of: (leaf of a stack, index or slice of indices) -> leaf of the layer or the layers.
      delta_layers: indices of the layers with Gated DeltaNet, which `delta` of the stack has.
      period: layers of a period; None is the layer alone.
    """
    has_delta, before = index in delta_layers, sum(layer < index for layer in delta_layers)
    selected = select_attention(stack, has_delta)

    def select_field(name: str) -> Any:
        start, step = index, period
        if name == "attention":
            start = before if has_delta else index - before
            if step is not None:
                delta_in_period = sum(layer < step for layer in delta_layers)
                step = delta_in_period if has_delta else step - delta_in_period
        selection = start if step is None else slice(start, None, step)
        return jax.tree.map(lambda leaf: layer_of(leaf, selection), getattr(selected, name))

    return Layer(**{field.name: select_field(field.name) for field in fields(selected)})


def split_layer_groups(
    weights: Transformer[Array], config: ModelConfig
) -> tuple[Layer[Array], ...]:
    """Unstacks all layers into groups, one for each output of `run_layers`: each layer by itself
    or, for a scanned stack, one stack for each index in its period."""
    return map_layer_groups(weights, config, lambda stacked, index: stacked[index])


def split_groups(outs: Sequence[Any], ran: ModelConfig, config: ModelConfig) -> list[Any]:
    """Splits the outputs of `run_layers` of all layers into the layer groups of a configuration
    that scans fewer stacks.

    Args:
      outs: trees of arrays, one for each layer group of `ran`.
      ran: configuration of the layers that have run.
      config: configuration of the groups: the same network, perhaps with stacks unrolled.
    """
    groups, dense = list[Any](), config.num_dense_layers
    for first, depth in ((0, dense), (dense, config.num_layers - dense)):
        if not depth:
            continue
        period = period_of_stack(config, depth, first)
        was_scanned, stays = (is_scanned(depth, one.execution, period) for one in (ran, config))
        size = period if was_scanned else depth
        stack, outs = outs[:size], outs[size:]
        if was_scanned == stays:
            groups += stack
        else:
            assert was_scanned, "layers that ran one by one are not stacked"
            indices = (divmod(layer, period) for layer in range(depth))
            groups += [
                jax.tree.map(lambda x, repeat=repeat: x[repeat], stack[position])
                for repeat, position in indices
            ]
    return groups


def map_layer_groups(
    weights: Transformer[Leaf],
    config: ModelConfig,
    layer_of: Callable[[Leaf, int | slice], Leaf],
) -> tuple[Layer[Leaf], ...]:
    """`split_layer_groups` for records of other leaves than arrays; `layer_of` is as for
    `layer_at`."""
    groups, delta_layers = list[Layer[Leaf]](), delta_layers_of(config)
    dense, routed = config.num_dense_layers, config.num_layers - config.num_dense_layers
    for stack, first, depth in ((weights.first_layers, 0, dense), (weights.layers, dense, routed)):
        if stack is None:
            continue
        period = period_of_stack(config, depth, first)
        if not is_scanned(depth, config.execution, period):
            groups += [layer_at(stack, index, layer_of, delta_layers) for index in range(depth)]
        elif period == 1:
            groups.append(stack)
        else:
            indices = range(period)
            groups += [layer_at(stack, index, layer_of, delta_layers, period) for index in indices]
    return tuple(groups)


def runs_of(groups: Sequence[Layer[Leaf]], config: ModelConfig) -> list[tuple[Layer[Leaf], ...]]:
    """Groups `split_layer_groups` into runs as they are computed: single layers, and all groups of
    a scanned stack."""
    runs, dense = list[tuple[Layer[Leaf], ...]](), config.num_dense_layers
    next_group = first = 0
    while next_group < len(groups):
        length = 1
        if is_stack(groups[next_group]):
            depth = config.num_layers - first if first == dense else dense
            length = period_of_stack(config, depth, first)
        run = tuple(groups[next_group : next_group + length])
        runs.append(run)
        next_group += length
        first += depth_of(run)
    return runs


def depth_of(run: Sequence[Layer[Any]]) -> int:
    """Number of layers in a run of groups."""
    return sum(num_layers(group) if is_stack(group) else 1 for group in run)


def is_stack(group: Layer[Any]) -> bool:
    """True if a group is a stack of layers, of a scanned stack."""
    return group.norm.ndim > 1
