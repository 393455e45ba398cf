"""LoRA adapters in PEFT's format: export and import of adapter_config.json and
adapter_model.safetensors.

A matrix of a checkpoint is ``[out, in]``, and so are its ``lora_A``, ``[rank, in]``, and its
``lora_B``, ``[out, rank]``. Experts are stacked parameters in `transformers`, ``gate_up_proj`` and
``down_proj``; PEFT concatenates their ranks: ``lora_A`` is ``[expert rank, in]``, expert after
expert, and ``lora_B`` ``[out, rank expert]``, rank after rank. PEFT puts two wrappers around such a
module, of which the first is the ``base_layer`` of the second.

For some MoE families (`Family.fused_in_peft`) PEFT takes any target module named ``gate_proj``,
``up_proj`` or ``down_proj`` for those of experts as `transformers` 4 had them, and turns them into
stacked parameters of twice the rank: there dense layers and shared experts are target parameters,
their ``weight``, which it leaves unchanged. The tensors are the same.

Options of adapter_config.json are supported, without effect, or rejected with their alternative,
checked against PEFT 0.21. An option that is not listed here is rejected, unless it is off.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from moe.adapters import Adapted, is_adapted, select_trained
from moe.architecture.lora import Lora, group_targets
from moe.config import ModelConfig
from moe.huggingface.checkpoint import write_tensors
from moe.huggingface.configuration import family_for
from moe.huggingface.options import Options
from moe.huggingface.tensors import Tensors, tensors_of
from moe.placement import in_chunks, shardings
from moe.weights import Transformer, adaptable_weights, axis_sizes, initialise_trained, table
from sharding.folding import FoldedMesh

WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
}
"""Options that change no logit: of files, of training, of a start that is over, and those that
say which modules have adapters, as the names of the tensors do."""

STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` beside true and false that leave the weights as they are."""
CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of those that take something off the weights that the adapters are beside."""

MERGE = (
    "merge it with PEFT, PeftModel.from_pretrained(BASE, DIR).merge_and_unload()"
    ".save_pretrained(OUT), and use OUT as the checkpoint"
)
CONVERT = (
    "convert it to a plain LoRA with PEFT after training, save_pretrained(DIR, "
    "path_initial_model_for_weight_conversion=START); or set the option to true if the checkpoint "
    "has the base weights that this initialisation left"
)
PLAIN = "train a plain LoRA"
REJECTED = {
    "alora_invocation_tokens": ("it is active only after invocation tokens (aLoRA)", PLAIN),
    "arrow_config": (
        "it routes among adapters (Arrow)",
        "use the folder of one of them",
    ),
    "fan_in_fan_out": ("its matrices are transposed", MERGE),
    "kasa_config": ("it removes singular values from the weights (KaSA)", MERGE),
    "layer_replication": ("it replicates layers", MERGE),
    "lora_bias": ("its matrices have biases", MERGE),
    "megatron_config": ("it was trained on Megatron layers", PLAIN),
    "modules_to_save": ("it has fully trained modules in addition to adapters", MERGE),
    "monteclora_config": ("it samples its matrices (MonteCLoRA)", MERGE),
    "trainable_token_indices": ("it has trained token embeddings", MERGE),
    "use_bdlora": ("its matrices are block-diagonal (BD-LoRA)", MERGE),
    "use_dora": ("it rescales columns of the weights (DoRA)", MERGE),
    "use_qalora": ("it pools its inputs (QALoRA)", PLAIN),
    "velora_config": ("it stores statistics of its inputs (VeLoRA)", MERGE),
}
"""Options that make another adapter of it where they are on: why, and what to do."""

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERTS = "mlp.experts"
"""Where `transformers` has the stacked experts of every architecture, whatever its files say."""
STACKED = {"gate_up": ("gate_up_proj", ".base_layer"), "down": ("down_proj", "")}
"""The parameter of experts that a weight is, and what PEFT puts after the module's name."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Modules that PEFT takes for those of experts."""


@dataclass(frozen=True)
class AdapterOptions:
    """Ranks and scales of the adapters in a folder.

    Attributes:
      rank, alpha: of modules that no pattern names.
      rank_stabilised: the scale is ``alpha / sqrt(rank)``, not ``alpha / rank``.
      ranks, alphas: other ones, by a regular expression for the end of a module's name.
      source: the file, for messages.
    """

    rank: int
    alpha: float | int
    rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float | int]
    source: str

    @classmethod
    def read(cls, path: Path) -> "AdapterOptions":
        """Those of an adapter_config.json.

        Raises:
          ValueError: there is none, or it describes adapters that are computed in another way; the
            option is named, with what to do.
        """
        options = Options.read(path)
        kind = options.take("peft_type", default=None)
        if kind != "LORA":
            raise _rejection(
                path, "peft_type", kind, "only LORA can be read", f"if PEFT can, {MERGE}"
            )
        _check_start(path, options.take("init_lora_weights", default=True))
        bias = options.take("bias", default="none")
        if bias != "none":
            raise _rejection(path, "bias", bias, "it has trained biases", MERGE)
        for name, (why, fix) in REJECTED.items():
            value = options.take(name, default=None)
            if value:
                raise _rejection(path, name, value, why, fix)
        rank, alpha = options.take("r"), options.take("lora_alpha")
        if not _is_rank(rank) or not _is_number(alpha):
            raise options.not_fitting(f"r={rank!r} and lora_alpha={alpha!r} must be numbers")
        options.require("use_rslora", True, False, default=False)
        adapter_options = cls(
            rank,
            float(alpha),
            options.take("use_rslora", default=False),
            _read_patterns(options, "rank_pattern", _is_rank),
            _read_patterns(options, "alpha_pattern", _is_number),
            str(path),
        )
        options.take(*WITHOUT_EFFECT, default=None)
        # What later versions have, as PEFT writes it where it is off.
        options.take(*(name for name, value in options.values.items() if not value), default=None)
        options.finish()
        return adapter_options

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return self.ranks.get(_matching_pattern(self.ranks, module), self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module's adapter."""
        return float(self.alphas.get(_matching_pattern(self.alphas, module), self.alpha))

    def scale_of(self, module: str) -> float:
        """LoRA scale: the factor on the product of a module's two matrices."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (rank**0.5 if self.rank_stabilised else rank)


def _check_start(path: Path, start: Any) -> None:
    """Refuses adapters that are not beside the weights as they are in the checkpoint."""
    if start in (None, True, False):
        return
    named = str(start).lower()
    if named.startswith(CHANGING_STARTS):
        # PEFT initialises again when it reads, with the same values only if none is sampled.
        fix = f"{MERGE}; or {CONVERT}" if named in ("pissa", "olora") else CONVERT
        why = "its initialisation changes the base weights"
        raise _rejection(path, "init_lora_weights", start, why, fix)
    if named not in STARTS:
        supported = ", ".join(STARTS)
        raise _rejection(
            path,
            "init_lora_weights",
            start,
            f"supported are true, false, {supported}",
            "set it to true if that initialisation leaves the base weights unchanged",
        )


def _read_patterns(options: Options, name: str, fits: Any) -> Mapping[str, Any]:
    """An option that maps regular expressions to numbers."""
    patterns = options.take(name, default=None) or {}
    if not isinstance(patterns, dict) or not all(map(fits, patterns.values())):
        raise options.not_fitting(f"{name}={patterns!r} must map module names to numbers")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise options.not_fitting(f"{name} has the pattern {pattern!r}: {error}") from None
    return patterns


def _matching_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first of the patterns that a module's name ends with, as PEFT matches them."""
    matching = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, module)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _rejection(path: Path, name: str, value: Any, why: str, fix: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ValueError(f"{path}: {name}={shown} is not supported, as {why}: {fix}.")


@dataclass(frozen=True)
class _Order:
    """Element order of an adapter in PEFT's tensors, for `a` and `b` of one layer.

    Attributes:
      a, b: the shapes of ours.
      experts: whether the first axis of both is that of experts.
      out: the axes of `b` after the rank, counted from there, in the order of PEFT's tensor.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    experts: bool
    out: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.a[-1]

    def shape_of(self, half: str, rank: int) -> tuple[int, int]:
        """Of PEFT's ``lora_A`` or ``lora_B`` where it has some rank."""
        experts = self.a[0] if self.experts else 1
        width = prod(self.a if half == "A" else self.b) // (experts * self.rank)
        return (experts * rank, width) if half == "A" else (width, experts * rank)

    def pad_rank(self, half: str, theirs: np.ndarray, rank: int) -> np.ndarray:
        """PEFT's tensor with zeros for the ranks that it has fewer than ours."""
        if rank == self.rank:
            return theirs
        experts = self.a[0] if self.experts else 1
        # A is of one expert after the other, B of one rank after the other.
        split = (experts, rank, -1) if half == "A" else (-1, rank, experts)
        wider = np.pad(theirs.reshape(split), ((0, 0), (0, self.rank - rank), (0, 0)))
        return wider.reshape(self.shape_of(half, self.rank))

    def a_to_theirs(self, a: np.ndarray) -> np.ndarray:
        """``[*in, rank]`` -> ``[rank, in]``; with experts in front ``[expert rank, in]``."""
        if self.experts:
            return a.swapaxes(1, 2).reshape(-1, a.shape[1])
        return a.reshape(-1, a.shape[-1]).T

    def b_to_theirs(self, b: np.ndarray) -> np.ndarray:
        """``[rank, *out]`` -> ``[out, rank]``; with experts in front ``[out, rank expert]``."""
        if self.experts:
            flat = b.transpose(0, 1, *self._out).reshape(*b.shape[:2], -1)
            return flat.transpose(2, 1, 0).reshape(flat.shape[2], -1)
        return b.reshape(b.shape[0], -1).T

    def a_to_ours(self, theirs: np.ndarray) -> np.ndarray:
        if self.experts:
            return theirs.reshape(self.a[0], self.a[2], self.a[1]).swapaxes(1, 2)
        return theirs.T.reshape(self.a)

    def b_to_ours(self, theirs: np.ndarray) -> np.ndarray:
        if self.experts:
            flat = theirs.reshape(prod(self.b[2:]), self.b[1], self.b[0]).transpose(2, 1, 0)
            ordered = flat.reshape(*self.b[:2], *(self.b[axis] for axis in self._out))
            return ordered.transpose(0, 1, *(2 + dim for dim in np.argsort(self.out)))
        return theirs.T.reshape(self.b)

    @property
    def _out(self) -> tuple[int, ...]:
        """The axes `out` of an expert's `b`."""
        return tuple(2 + axis for axis in self.out)


@dataclass(frozen=True)
class _Module:
    """One pair of tensors.

    Attributes:
      name: of the module, without the prefix and suffix of the names of tensors.
      target: what adapter_config.json calls it.
      is_parameter: whether that is one of ``target_parameters``.
      key: what the patterns of adapter_config.json are matched with.
      order: of its elements.
      weight_index: of the weight among those with adapters.
      index: in the stack of the weight.
    """

    name: str
    target: str
    is_parameter: bool
    key: str
    order: _Order
    weight_index: int
    index: tuple[int, ...]


def save_adapters(
    directory: str | Path,
    config: ModelConfig,
    weights: Transformer[Array],
    *,
    architecture: str | None = None,
    base: str | None = None,
) -> None:
    """Writes the adapters of a network, float32.

    Args:
      directory: made where it does not exist; files of the same names are replaced.
      config: the network, with its adapters.
      weights: its weights, the layers in order, on devices of this process; those without adapters
        may be None.
      architecture: as for `moe.huggingface.options_from`, which must know the network.
      base: the checkpoint that the adapters are beside, as PEFT is to find it.

    Raises:
      ValueError: for a network without adapters, or one that no architecture expresses.
    """
    if config.lora is None:
        raise ValueError(
            "the config has no lora, so there are no adapters to write: use save for the weights."
        )
    directory, lora = Path(directory), config.lora
    leaves = [leaf for leaf in jax.tree.leaves(weights, is_leaf=is_adapted) if is_adapted(leaf)]
    modules, tensors = _modules(config, architecture), {}
    for module in modules:
        leaf, order = leaves[module.weight_index], module.order
        a, b = (np.asarray(x[module.index], np.float32) for x in (leaf.a, leaf.b))
        tensors[f"{PREFIX}{module.name}.lora_A.weight"] = order.a_to_theirs(a)
        tensors[f"{PREFIX}{module.name}.lora_B.weight"] = order.b_to_theirs(b)
    options = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilised,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({m.target for m in modules if not m.is_parameter}),
        "target_parameters": sorted({m.target for m in modules if m.is_parameter}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    write_tensors(contiguous, directory / TENSORS)
    (directory / CONFIG).write_text(json.dumps(options, indent=2) + "\n")


def adapters_of(
    directory: str | Path, config: ModelConfig, architecture: str | None = None
) -> Lora:
    """Rank, scale and targets of the adapters in a folder; of ranks that differ the greatest.

    Targets are the weights that some layer has an adapter for.

    Args:
      config: the network that they are beside.
      architecture: as for `save_adapters`.

    Raises:
      ValueError: where the folder holds none, those of another network, or some that are computed
        in another way; it is named.
    """
    directory = Path(directory)
    options = AdapterOptions.read(directory / CONFIG)
    plain = config.without_adapters()
    available = tuple(adaptable_weights(plain))
    every_weight = Lora(options.rank, options.alpha, available, options.rank_stabilised)
    with _open(directory) as file:
        names = set(file.keys())
    modules_by_weight = dict[str, list[_Module]]()
    for weight in available:
        modules = _modules(_with_targets(plain, every_weight, (weight,)), architecture)
        present = [module for module in modules if f"{PREFIX}{module.name}.lora_A.weight" in names]
        if present:
            modules_by_weight[weight] = present
    if not modules_by_weight:
        raise ValueError(
            f"{directory} has no adapter for a weight of this model: use the folder of its "
            "adapters."
        )
    widest = max(
        (module for modules in modules_by_weight.values() for module in modules),
        key=lambda module: options.rank_of(module.key),
    )
    rank, alpha = options.rank_of(widest.key), options.alpha_of(widest.key)
    targets = group_targets(modules_by_weight, available)
    return Lora(rank, alpha, targets, options.rank_stabilised)


def load_adapters(
    directory: str | Path, config: ModelConfig, mesh: FoldedMesh, architecture: str | None = None
) -> Transformer[Array]:
    """The adapters in a folder, float32, sharded over `mesh` as `moe.placement.in_chunks` stores
    them; None in place of the weights beside them.

    Matrices of a target that the folder has none for get adapters of zeros, which stay zeros: it is
    as if there were none. So do the ranks that a matrix has fewer than the network; where its scale
    is another than the network's, its B makes up for it.

    Args:
      config: the network, with adapters as `adapters_of` describes them.
      architecture: as for `save_adapters`.

    Raises:
      ValueError: when tensors are unknown, lack their other half, or have another shape.
    """
    directory, statement = Path(directory), table(config)
    options = AdapterOptions.read(directory / CONFIG)
    shapes = jax.eval_shape(lambda: initialise_trained(config, jax.random.key(0)))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    leaves = [leaf for leaf in jax.tree.leaves(empty, is_leaf=is_adapted) if is_adapted(leaf)]
    wrong, expected = list[str](), set[str]()
    with _open(directory) as file:
        present = set(file.keys())
        for module in _modules(config, architecture):
            leaf, order = leaves[module.weight_index], module.order
            names = [f"{PREFIX}{module.name}.lora_{half}.weight" for half in "AB"]
            expected.update(names)
            if not present.intersection(names):
                continue
            if not present.issuperset(names):
                wrong.append(f"{module.name} has only one of lora_A and lora_B")
                continue
            theirs = [np.asarray(file.get_tensor(name)).astype(np.float32) for name in names]
            rank = options.rank_of(module.key)
            for half, x, name in zip("AB", theirs, names, strict=True):
                shape = order.shape_of(half, rank)
                if x.shape != shape:
                    wrong.append(f"{name.removeprefix(PREFIX)} has {x.shape}, not {shape}")
            if wrong:
                continue
            a, b = (order.pad_rank(half, x, rank) for half, x in zip("AB", theirs, strict=True))
            module_scale, scale = options.scale_of(module.key), _lora_of(config).scale
            if module_scale != scale:
                b = b * np.float32(module_scale / scale)
            leaf.a[module.index], leaf.b[module.index] = order.a_to_ours(a), order.b_to_ours(b)
    # PEFT keeps a copy of a head that has an adapter.
    expected |= {f"{PREFIX}lm_head.base_layer.weight"}
    wrong += [f"unknown {name}" for name in sorted(present - expected)]
    if wrong:
        raise ValueError(
            f"{directory / TENSORS} does not fit this model "
            f"({len(wrong)} tensors differ): {'; '.join(wrong)}."
        )
    target_shardings = select_trained(shardings(config, mesh), statement)
    return jax.device_put(in_chunks(empty, mesh), target_shardings)


def _adapted_weights(
    config: ModelConfig, architecture: str | None
) -> Iterator[tuple[str, Adapted[Any], Tensors]]:
    """Name, statement and tensors of each weight with an adapter, in the order of the leaves."""
    plain = config.without_adapters()
    plans = tensors_of(plain, family_for(plain, architecture))
    listed = jax.tree_util.tree_leaves_with_path(table(config), is_leaf=is_adapted)
    for (path, stated), plan in zip(listed, plans, strict=True):
        if is_adapted(stated):
            yield path[-1].name, stated, plan


def _order_of(stated: Adapted[Any], plan: Tensors, sizes: Mapping[str, int]) -> _Order:
    experts = _is_of_experts(stated)
    front = 1 if experts else len(plan.stack)
    a, b = (weight.axes.split()[front:] for weight in (stated.a, stated.b))
    stored_axes = out_axes = [axis for axis in b if axis not in ("expert", "lora_rank")]
    if experts and "expert" not in plan.stack:
        # One parameter that a checkpoint has as one too has its elements as they are there.
        stored_axes = [axis for axes in plan.dimensions for axis in axes if axis in out_axes]
    a_shape, b_shape = (tuple(sizes[axis] for axis in axes) for axes in (a, b))
    return _Order(a_shape, b_shape, experts, tuple(out_axes.index(axis) for axis in stored_axes))


def _is_of_experts(stated: Adapted[Any]) -> bool:
    return "expert" in stated.base.axes.split()


def _modules(config: ModelConfig, architecture: str | None) -> list[_Module]:
    modules, sizes = [], axis_sizes(config)
    fused = family_for(config.without_adapters(), architecture).fused_in_peft
    for weight_index, (name, stated, plan) in enumerate(_adapted_weights(config, architecture)):
        order = _order_of(stated, plan, sizes)
        if _is_of_experts(stated):
            parameter, suffix = STACKED[name]
            for layer in range(plan.sizes["layer"]):
                module = f"model.layers.{plan.layers[layer]}.{EXPERTS}{suffix}"
                target = f"{EXPERTS}.{parameter}"
                key = f"model.layers.{plan.layers[layer]}.{target}"
                modules.append(_Module(module, target, True, key, order, weight_index, (layer,)))
            continue
        for index, tensor in plan.names():
            module = tensor.removesuffix(".weight")
            # The same for all layers: what follows the layer's number.
            target = module.split(".", 3)[-1] if plan.stack else module
            by_weight = fused and module.endswith(PROJECTIONS)
            suffix = ".weight" if by_weight else ""
            modules.append(
                _Module(
                    name=module,
                    target=target + suffix,
                    is_parameter=by_weight,
                    key=module + suffix,
                    order=order,
                    weight_index=weight_index,
                    index=index,
                )
            )
    return modules


def _lora_of(config: ModelConfig) -> Lora:
    if config.lora is None:
        raise ValueError(
            "the config has no lora, so no adapters can be read: set lora to adapters_of(...)."
        )
    return config.lora


def _with_targets(plain: ModelConfig, lora: Lora, targets: tuple[str, ...]) -> ModelConfig:
    return replace(plain, lora=replace(lora, targets=targets))


def _open(directory: Path) -> Any:
    import safetensors  # an extra

    path = directory / TENSORS
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): use a folder that PEFT wrote, with safetensors."
        ) from error
