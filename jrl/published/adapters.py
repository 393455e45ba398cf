"""LoRA adapters of a published checkpoint, in PEFT's format: their folder and its checks, and
targets by the module names of the checkpoint (`target_modules`)."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moe.architecture.lora import Lora, group_targets, is_target
from moe.config import ModelConfig
from moe.huggingface import adapters_of, architecture_of, check_head_copy
from moe.huggingface.adapters import EXPERTS, STACKED
from moe.huggingface.configuration import FAMILIES, family_for
from moe.huggingface.family import Family
from moe.huggingface.tensors import tensors_of
from moe.weights import adaptable_weights, targets_of

ALL_LINEAR = "all-linear"
"""PEFT's name for all modules but the head."""

Modules = dict[str, list[set[str]]]
"""Modules of each weight, by the weight's name as a target; one set of names for each module that
is a part of it (gate and up), any of which is sufficient."""


def open_adapters(directory: str, checkpoint: Path | str, config: ModelConfig, option: str) -> Lora:
    """Rank, scale and targets of the adapters in a folder, from its options and names of tensors.

    Args:
      checkpoint, config: the folder of the checkpoint that they are added to, and its network.
      option: the setting that named the folder, for error messages.

    Raises:
      ValueError: if the folder has no adapters, or adapters of another network.
    """
    if not (Path(directory) / "adapter_config.json").is_file():
        inner = Path(directory) / "adapters"
        fix = f"give {inner}" if inner.is_dir() else "give a folder that PEFT or a run wrote"
        raise ValueError(f"{option}={directory!r} has no adapter_config.json: {fix}.")
    lora = adapters_of(directory, config, architecture_of(checkpoint))
    check_head_copy(directory, checkpoint)
    return lora


def check_of_checkpoint(directory: str | None, policy: str, is_checkpoint: bool) -> None:
    """Rejects ``--lora`` for a run: it has its own adapters or none."""
    if directory is not None and not is_checkpoint:
        raise ValueError(
            f"lora={directory!r} needs a published checkpoint to add adapters to, and {policy} is "
            "a run, which has its own: leave it out, or give the checkpoint."
        )


def targets_from_modules(config: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Targets of `moe.architecture.lora.Lora` from module names as in PEFT's `target_modules`.

    A name means every module whose own name ends with it: ``q_proj``, ``mlp.down_proj``. Stacked
    experts are ``mlp.experts.gate_up_proj`` and ``mlp.experts.down_proj`` too.

    Args:
      config: the network; its module names come from all architectures that can express it,
        none for a preset that no architecture has.
      names: may include targets of `Lora`.

    Raises:
      ValueError: for a name that no module ends with, and for one of gate and up without the
        other, as they are one weight here.
    """
    modules = _modules(config.without_adapters())
    chosen = {weight for weight in modules if weight != "head" and ALL_LINEAR in names}
    chosen |= {each for each in modules if {each, each.partition(".")[0]} & set(names)}
    for weight, parts in modules.items():
        named = [any(_is_meant(module, names) for module in part) for part in parts]
        if named and all(named):
            chosen.add(weight)
        elif any(named) and weight not in chosen:
            listed = " and ".join(sorted(max(part).rpartition(".")[2] for part in parts))
            raise ValueError(
                f"lora_targets={','.join(names)!r} has a part of {listed}, which are one weight "
                "here: name both, or none."
            )
    named_modules = {module for parts in modules.values() for part in parts for module in part}
    for name in names:
        is_weight = is_target(name) and any(weight.startswith(name) for weight in modules)
        is_module = any(_is_meant(module, [name]) for module in named_modules)
        if not (name == ALL_LINEAR or is_weight or is_module):
            available = sorted({module.rpartition(".")[2] for module in named_modules})
            fix = ",".join(available) if named_modules else ",".join(targets_of(config))
            raise ValueError(
                f"lora_targets={','.join(names)!r} has {name!r}, which no module with adapters of "
                f"this network is called: choose among {fix} or {ALL_LINEAR}."
            )
    return group_targets(chosen, tuple(modules))


def _is_meant(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _modules(config: ModelConfig) -> Modules:
    leaves = adaptable_weights(config)
    modules: Modules = {weight: [] for weight in leaves}
    for family in _families(config):
        plans = tensors_of(config, family)
        for weight, indices in leaves.items():
            for index in indices:
                templates = plans[index].name_templates
                modules[weight] = parts = modules[weight] or [set() for _ in templates]
                for part, template in zip(parts, templates, strict=True):
                    part.add(template.removesuffix(".weight"))
    for weight, parts in modules.items():
        group, _, name = weight.partition(".")
        if group == "experts":
            for part in parts:
                part.add(f"{EXPERTS}.{STACKED[name][0]}")
    return modules


def _families(config: ModelConfig) -> Iterator[Family]:
    """The architectures that can express a network; a factor on embeddings has no part in names."""
    for stated in (config, replace(config, embedding_scale=1.0)):
        for family in FAMILIES:
            with contextlib.suppress(ValueError):
                yield family_for(stated, family.architecture)
