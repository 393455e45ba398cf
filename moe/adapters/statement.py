"""Table of a network's weights with LoRA adapters added to the targets."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from moe.adapters.adapted import Adapted
from moe.architecture.lora import TARGETS
from moe.config import ModelConfig

Tree = TypeVar("Tree")

MATRICES = {
    "attention": ("query_down", "query", "key", "value", "down", "up", "out"),
    "experts": ("gate_up", "down"),
    "dense": ("gate_up", "down"),
}
"""The weights of a record that are operands of its matrix products."""
STACKS = ("layer", "first_layer", "attention_layer", "expert")
"""Axes along which each entry has an adapter of its own."""


def with_adapters(plain: Tree, config: ModelConfig) -> Tree:
    """The table of weights with adapters: all frozen but for a value head, and each target
    replaced by an `Adapted` of three.

    A starts normal with variance ``1 / (3 fan-in)``, that of PEFT's uniform start, and B with
    zeros: training starts at the frozen weights.

    Args:
      plain: the table without adapters, `moe.weights.Weight`s.
    """
    lora = config.lora
    if lora is None:
        return plain

    def adapt(path: Any, weight: Any) -> Any:
        names = _names(path)
        if names == ["head"] and config.head == "value":
            return weight
        base = replace(weight, frozen=True)
        if _target_of(names, config) not in lora.targets:
            return base
        axes, in_axes = weight.axes.split(), weight.fan_in.split()
        # PEFT adapts gate and up of a dense layer separately, and those of stacked experts as the
        # one parameter that they are there: with the same shapes, its files can be loaded.
        stacks = STACKS if "expert" in axes else (*STACKS, "half")
        stack = [axis for axis in axes if axis in stacks]
        out_axes = [axis for axis in axes if axis not in (*stack, *in_axes)]
        new = replace(weight, sampled_along=None, float32=True)
        a = " ".join([*stack, *in_axes, "lora_rank"])
        b = " ".join([*stack, "lora_rank", *out_axes])
        return Adapted(
            base=base,
            a=replace(new, axes=a, scale=1 / math.sqrt(3)),
            b=replace(new, axes=b, fan_in="", scale=0.0),
            scale=lora.scale,
        )

    return jax.tree_util.tree_map_with_path(adapt, plain)


def targets_in(plain: Any, config: ModelConfig) -> tuple[str, ...]:
    """Those of `TARGETS` that a network has, from its table without adapters."""
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    present = {_target_of(_names(path), config) for path, _ in leaves}
    return tuple(target for target in TARGETS if target in present)


def _names(path: Any) -> list[str]:
    return [entry.name for entry in path]


def _target_of(names: Sequence[str], config: ModelConfig) -> str | None:
    """The entry of `TARGETS` that a weight belongs to, None for none."""
    if list(names) == ["head"]:
        return "head" if config.head == "untied" else None
    record, name = names[-2:] if len(names) > 1 else ("", names[-1])
    if name not in MATRICES.get(record, ()):
        return None
    is_shared_expert = record == "dense" and names[0] == "layers" and config.num_experts
    return "shared" if is_shared_expert else record
