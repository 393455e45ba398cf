"""LoRA adapters in PEFT's format: export and import of adapter_config.json and
adapter_model.safetensors.

A matrix of a checkpoint is ``[out, in]``, and so are its ``lora_A``, ``[rank, in]``, and its
``lora_B``, ``[out, rank]``. Experts are stacked parameters in `transformers`, ``gate_up_proj`` and
``down_proj``; PEFT concatenates their ranks: ``lora_A`` is ``[expert rank, in]``, expert after
expert, and ``lora_B`` ``[out, rank expert]``, rank after rank. PEFT puts two wrappers around such a
module, of which the first is the ``base_layer`` of the second.

For some MoE families (`Family.fused_in_peft`) PEFT takes any target module named ``gate_proj``,
``up_proj`` or ``down_proj`` for projections of experts as `transformers` 4 had them, and turns them
into stacked parameters of twice the rank: there dense layers and shared experts are target
parameters, their ``weight``, which it leaves unchanged. The tensors are the same.

Options of adapter_config.json are supported, without effect, or rejected with their alternative,
checked against PEFT 0.21. An option that is not listed here is rejected, unless it is off.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from moe.adapters import Adapted, is_adapted, select_trained
from moe.architecture.lora import Lora, group_targets
from moe.config import Model, ModelConfig
from moe.huggingface.checkpoint import (
    EMBEDDING,
    HEAD,
    open_tensors,
    same_values,
    write_json,
    write_tensors,
)
from moe.huggingface.configuration import family_for
from moe.huggingface.options import Options
from moe.huggingface.quantised import PlainTensor
from moe.huggingface.tensors import Tensors, tensors_of
from moe.placement import in_chunks, shardings
from moe.weights import Transformer, adaptable_weights, axis_sizes, initialise_trained, table

WITHOUT_EFFECT = {
    # Files and the programs that wrote them.
    *("auto_mapping", "base_model_name_or_path", "peft_version", "revision"),
    *("inference_mode", "runtime_config", "task_type"),
    # Training, and a start that is over.
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "lora_dropout"),
    *("ensure_weight_tying", "megatron_core", "qalora_group_size"),
    # Which modules have adapters, as the names of the tensors say.
    *("exclude_modules", "layers_pattern", "layers_to_transform"),
    *("target_modules", "target_parameters"),
}
"""Options that change no logit."""

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
    "arrow_config": ("it routes among adapters (Arrow)", "use the folder of one of them"),
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
"""Options that make another kind of adapter when they are on: why, and what to do."""

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"
"""Copy of the head that PEFT keeps beside an adapter of it."""
EXPERTS = "mlp.experts"
"""Where `transformers` has the stacked experts of every architecture, whatever its files say."""
STACKED = {"gate_up": ("gate_up_proj", ".base_layer"), "down": ("down_proj", "")}
"""The parameter of experts that a weight is, and what PEFT puts after the module's name."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Modules that PEFT takes for projections of experts."""


@dataclass(frozen=True)
class AdapterOptions:
    """Ranks and scales of the adapters in a folder.

    Attributes:
      rank, alpha: values for modules that no pattern names.
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
        """Reads the options of an adapter_config.json.

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
        options.pass_over(*WITHOUT_EFFECT)
        # Options of later versions, in the form that PEFT writes if they are off.
        options.pass_over(*(name for name, value in options.values.items() if not value))
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
        why = f"supported are true, false, {', '.join(STARTS)}"
        fix = "set it to true if that initialisation leaves the base weights unchanged"
        raise _rejection(path, "init_lora_weights", start, why, fix)


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

    Ours are ``[expert, *in, rank]`` and ``[expert, rank, *out]``, without the first axis for a
    weight that is not of experts; PEFT's are ``[expert rank, in]`` and ``[out, rank expert]``.

    Attributes:
      a, b: the shapes of ours.
      experts: the number of experts; None for another weight.
      out: the axes of `b` after the rank, counted from there, in the order of PEFT's tensor.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    experts: int | None
    out: tuple[int, ...]

    def shapes_of(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of PEFT's ``lora_A`` and ``lora_B`` at a rank."""
        rows, lora_rank = (self.experts or 1) * rank, (self.experts or 1) * self.a[-1]
        return (rows, prod(self.a) // lora_rank), (prod(self.b) // lora_rank, rows)

    def to_theirs(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``lora_A`` and ``lora_B``."""
        experts, rank = self.experts or 1, self.a[-1]
        in_last = a.reshape(experts, -1, rank).swapaxes(1, 2)
        axes = (2 + axis for axis in self.out)
        out = b.reshape(experts, rank, *self._out_sizes).transpose(0, 1, *axes)
        out_first = out.reshape(experts, rank, -1).transpose(2, 1, 0)
        shape_a, shape_b = self.shapes_of(rank)
        return in_last.reshape(shape_a), out_first.reshape(shape_b)

    def to_ours(
        self, lora_a: np.ndarray, lora_b: np.ndarray, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """`a` and `b` with zeros for the ranks that PEFT's tensors have fewer."""
        experts, fewer = self.experts or 1, self.a[-1] - rank
        rank_last = lora_a.reshape(experts, rank, -1).swapaxes(1, 2)
        a = np.pad(rank_last, ((0, 0), (0, 0), (0, fewer)))
        rank_first = lora_b.reshape(-1, rank, experts).transpose(2, 1, 0)
        b = np.pad(rank_first, ((0, 0), (0, fewer), (0, 0)))
        ordered = b.reshape(*b.shape[:2], *(self._out_sizes[axis] for axis in self.out))
        inverse = (2 + int(axis) for axis in np.argsort(self.out))
        return a.reshape(self.a), ordered.transpose(0, 1, *inverse).reshape(self.b)

    @property
    def _out_sizes(self) -> tuple[int, ...]:
        return self.b[1 if self.experts is None else 2 :]


@dataclass(frozen=True)
class _Module:
    """One pair of tensors.

    Attributes:
      name: name of the module, without the prefix and suffix of the names of tensors.
      target: what adapter_config.json calls it.
      is_parameter: whether that is one of ``target_parameters``.
      key: what the patterns of adapter_config.json are matched with.
      order: order of its elements.
      weight_index: index of the weight among the weights with adapters.
      index: index in the stack of the weight.
    """

    name: str
    target: str
    is_parameter: bool
    key: str
    order: _Order
    weight_index: int
    index: tuple[int, ...]

    @property
    def tensor_names(self) -> tuple[str, str]:
        """Of its ``lora_A`` and ``lora_B``."""
        base = f"{PREFIX}{self.name}"
        return f"{base}.lora_A.weight", f"{base}.lora_B.weight"


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
      directory: created if it does not exist; files of the same names are replaced.
      config: the network, with its adapters.
      weights: its weights, the layers in order, on devices of this process; those without adapters
        may be None.
      architecture: as for `moe.huggingface.options_from`, which must support the network.
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
        leaf = leaves[module.weight_index]
        a, b = (np.asarray(x[module.index], np.float32) for x in (leaf.a, leaf.b))
        tensors |= zip(module.tensor_names, module.order.to_theirs(a, b), strict=True)
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
    write_json(directory / CONFIG, options)


def adapters_of(
    directory: str | Path, config: ModelConfig, architecture: str | None = None
) -> Lora:
    """Rank, scale and targets of the adapters in a folder; of ranks that differ the greatest.

    Targets are the weights that some layer has an adapter for.

    Args:
      config: the network that they are beside.
      architecture: as for `save_adapters`.

    Raises:
      ValueError: if the folder holds no adapters, adapters of another network, or adapters that are
        computed in another way; it is named.
    """
    directory = Path(directory)
    options = AdapterOptions.read(directory / CONFIG)
    plain = config.without_adapters()
    available = tuple(adaptable_weights(plain))
    with _open(directory) as file:
        names = set(file.keys())
    modules_by_weight = dict[str, list[_Module]]()
    for weight in available:
        lora = Lora(options.rank, options.alpha, (weight,), options.rank_stabilised)
        modules = _modules(replace(plain, lora=lora), architecture)
        present = [module for module in modules if module.tensor_names[0] in names]
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


def check_head_copy(directory: str | Path, checkpoint: str | Path) -> None:
    """Refuses adapters that have a head of their own: PEFT would load it over the checkpoint's
    head, and here nothing reads it.

    Raises:
      ValueError: naming the file.
    """
    path = Path(directory) / TENSORS
    with _open(Path(directory)) as file, ExitStack() as stack:
        if HEAD_COPY not in set(file.keys()):
            return
        files = open_tensors(Path(checkpoint), stack)
        head = files.get(HEAD) or files.get(f"model.{EMBEDDING}")
        if head is None or not same_values(PlainTensor(file, path, HEAD_COPY), head):
            raise ValueError(
                f"{path}: {HEAD_COPY} is not the head of {checkpoint}, and would be left out: use "
                f"the checkpoint that the adapters were trained on, or {MERGE}."
            )


def load_adapters(
    directory: str | Path, model: Model, architecture: str | None = None
) -> Transformer[Array]:
    """Loads the adapters of a folder, float32, sharded over the model's mesh as
    `moe.placement.in_chunks` stores them; None in place of the weights beside them.

    Matrices of a target that the folder has none for get adapters of zeros, which stay zeros: it is
    as if there were none. So do the ranks that a matrix has fewer than the network; where its scale
    is another than the network's, its B makes up for it.

    Args:
      model: the network, with adapters as `adapters_of` describes them.
      architecture: as for `save_adapters`.

    Raises:
      ValueError: for a network without adapters, and when tensors are unknown, lack their other
        half, or have another shape.
    """
    config = model.config
    if (lora := config.lora) is None:
        raise ValueError(
            "the config has no lora, so no adapters can be read: set lora to adapters_of(...)."
        )
    directory, statement = Path(directory), table(config)
    options = AdapterOptions.read(directory / CONFIG)
    shapes = jax.eval_shape(lambda: initialise_trained(config, jax.random.key(0)))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    leaves = [leaf for leaf in jax.tree.leaves(empty, is_leaf=is_adapted) if is_adapted(leaf)]
    wrong, expected = list[str](), set[str]()
    with _open(directory) as file:
        present = set(file.keys())
        for module in _modules(config, architecture):
            leaf, order, names = leaves[module.weight_index], module.order, module.tensor_names
            expected.update(names)
            if not present.intersection(names):
                continue
            if not present.issuperset(names):
                wrong.append(f"{module.name} has only one of lora_A and lora_B")
                continue
            theirs = [np.asarray(file.get_tensor(name)).astype(np.float32) for name in names]
            rank = options.rank_of(module.key)
            for name, x, shape in zip(names, theirs, order.shapes_of(rank), strict=True):
                if x.shape != shape:
                    wrong.append(f"{name.removeprefix(PREFIX)} has {x.shape}, not {shape}")
            if wrong:
                continue
            lora_a, lora_b = theirs
            module_scale = options.scale_of(module.key)
            if module_scale != lora.scale:
                lora_b = lora_b * np.float32(module_scale / lora.scale)
            leaf.a[module.index], leaf.b[module.index] = order.to_ours(lora_a, lora_b, rank)
    expected |= {HEAD_COPY}  # `check_head_copy` looks at it
    wrong += [f"unknown {name}" for name in sorted(present - expected)]
    if wrong:
        raise ValueError(
            f"{directory / TENSORS} does not fit this model "
            f"({len(wrong)} tensors differ): {'; '.join(wrong)}."
        )
    target_shardings = select_trained(shardings(model), statement)
    return jax.device_put(in_chunks(empty, model.mesh), target_shardings)


def _order_of(stated: Adapted[Any], plan: Tensors, sizes: Mapping[str, int]) -> _Order:
    has_experts = "expert" in stated.base.axes.split()
    front = 1 if has_experts else len(plan.stack)
    a, b = (weight.axes.split()[front:] for weight in (stated.a, stated.b))
    stored_axes = out_axes = [axis for axis in b if axis not in ("expert", "lora_rank")]
    if has_experts and "expert" not in plan.stack:
        # One parameter that a checkpoint has as one too has its elements as they are there.
        stored_axes = [axis for axes in plan.dimensions for axis in axes if axis in out_axes]
    a_shape, b_shape = (tuple(sizes[axis] for axis in axes) for axes in (a, b))
    out = tuple(out_axes.index(axis) for axis in stored_axes)
    return _Order(a_shape, b_shape, sizes["expert"] if has_experts else None, out)


def _modules(config: ModelConfig, architecture: str | None) -> list[_Module]:
    modules, sizes, plain = [], axis_sizes(config), config.without_adapters()
    family = family_for(plain, architecture)
    listed = jax.tree_util.tree_leaves_with_path(table(config), is_leaf=is_adapted)
    plans = zip(listed, tensors_of(plain, family), strict=True)
    adapted = ((path, stated, plan) for (path, stated), plan in plans if is_adapted(stated))
    for weight_index, (path, stated, plan) in enumerate(adapted):
        order = _order_of(stated, plan, sizes)
        if order.experts is not None:
            parameter, suffix = STACKED[path[-1].name]
            target = f"{EXPERTS}.{parameter}"
            for layer, number in enumerate(plan.layers):
                in_layer = f"model.layers.{number}."
                module, key = f"{in_layer}{EXPERTS}{suffix}", in_layer + target
                modules.append(_Module(module, target, True, key, order, weight_index, (layer,)))
            continue
        for index, tensor in plan.names():
            module = tensor.removesuffix(".weight")
            # The same for all layers: what follows the layer's number.
            target = module.split(".", 3)[-1] if plan.stack else module
            by_weight = family.fused_in_peft and module.endswith(PROJECTIONS)
            suffix = ".weight" if by_weight else ""
            target, key = target + suffix, module + suffix
            modules.append(_Module(module, target, by_weight, key, order, weight_index, index))
    return modules


def _open(directory: Path) -> Any:
    import safetensors  # an extra

    path = directory / TENSORS
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): use a folder that PEFT wrote, with safetensors."
        ) from error
