"""Options of adapter_config.json (PEFT): supported ones, ones without effect, and rejected ones
with their alternatives.

Checked against PEFT 0.21. An option that is not listed here is rejected, unless it is off.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.huggingface.options import Options

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
