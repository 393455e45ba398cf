"""Conversion between config.json and `ModelConfig`.

An architecture is described in both directions. A configuration that cannot be expressed is
detected by writing it and reading it back.
"""

import contextlib
import json
import math
import types
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moe.config import ModelConfig
from moe.huggingface.dense_families import (
    GEMMA3,
    LLAMA,
    MISTRAL,
    OLMO3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from moe.huggingface.family import Family, read_groups, write_groups
from moe.huggingface.moe_families import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from moe.huggingface.options import Options
from moe.huggingface.shared_options import COMMON

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V3),
    *(OLMO3, SMOLLM3, GLM4_MOE, GPT_OSS, GEMMA3, QWEN3_NEXT),
)
"""Supported architectures. A network that several can express is written as the first of them."""

Dtype = Literal["float32", "bfloat16"]
_HINTS = get_type_hints(ModelConfig)

UNBALANCED: dict[str, Any] = {
    "load_balance_coef": 0.0,
    "router_z_coef": 0.0,
    "batch_balance_coef": 0.0,
    "global_balance_coef": 0.0,
    "bias_update_rate": 0.0,
}
"""Auxiliary loss coefficients of an imported network, all off: further training sets its own. The
`router_aux_loss_coef` of a config.json belongs to its past training."""
TRAINING = (
    *UNBALANCED,
    *("max_positions", "capacity_factor", "drop_policy", "drop_scope"),
    *("dtype", "execution", "lora", "unused_ids"),
)
"""Fields of `ModelConfig` that say how a network is trained and computed, not which it is."""
ROUTING = (
    "experts_per_token",
    "d_expert",
    "router_scores",
    "softmax_after_topk",
    "renormalise",
    "routed_scaling",
    "num_expert_groups",
    "expert_groups_per_token",
    "selection_bias",
)
"""Fields that mean nothing without experts."""


def config_from(
    path: str | Path, dtype: Dtype | None = None, ignore: Collection[str] = ()
) -> ModelConfig:
    """The network that a checkpoint describes.

    Its router has no losses and its selection bias does not move: see `UNBALANCED`.

    Args:
      path: the checkpoint's directory, or its config.json.
      dtype: dtype of activations; None is "bfloat16" if the checkpoint's is, otherwise "float32".
      ignore: options that are passed over although they are not known.

    Raises:
      ValueError: when the architecture or one of the options is not supported; it is named.
    """
    return read_config(path, dtype, ignore)[0]


def read_config(
    path: str | Path, dtype: Dtype | None = None, ignore: Collection[str] = ()
) -> tuple[ModelConfig, Family]:
    """`config_from`, and the architecture that names the tensors."""
    config, family, options = _read(path, dtype)
    options.finish(ignore, "Pass over those that have no effect: --ignore-options NAME.")
    return config, family


def idle_options(path: str | Path) -> list[str]:
    """Options of a config.json that are not known and off, as "name=value": passed over."""
    _, _, options = _read(path, None)
    return [f"{name}={json.dumps(value)}" for name, value in options.idle().items()]


def option_names(path: str | Path) -> set[str]:
    """Names of all options of a config.json."""
    return set(_options(path).values)


def family_of(path: str | Path) -> Family:
    """The architecture that names a checkpoint's tensors."""
    return _family(_options(path))


def architecture_of(path: str | Path) -> str:
    """The architecture that a checkpoint is one of, for example "Qwen3MoeForCausalLM"."""
    return family_of(path).architecture


def _options(path: str | Path) -> Options:
    path = Path(path)
    return Options.read(path / "config.json" if path.is_dir() else path)


def _read(path: str | Path, dtype: Dtype | None) -> tuple[ModelConfig, Family, Options]:
    options = _options(path)
    family = _family(options)
    options = options.with_defaults(family.defaults)
    try:
        model_fields = read_groups((*COMMON, *family.option_groups), options)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise options.not_fitting(f"one of its options has the wrong type ({error})") from error
    stored = options.take("dtype", "torch_dtype", default=None)
    for name, value in model_fields.items():
        if not _fits(value, _HINTS[name]):
            raise options.not_fitting(f"{name}={value!r} has the wrong type or range")
    dtype = dtype or ("bfloat16" if stored == "bfloat16" else "float32")
    return ModelConfig(**model_fields, **UNBALANCED, dtype=dtype), family, options


def options_from(config: ModelConfig, architecture: str | None = None) -> dict[str, Any]:
    """The config.json of a network.

    Args:
      architecture: for example "Qwen3MoeForCausalLM"; None takes the first that can express it.

    Raises:
      ValueError: if none can, or the requested one cannot; the message names the fields that it
        lacks.
    """
    return _write_options(config, family_for(config, architecture))


def family_for(config: ModelConfig, architecture: str | None = None) -> Family:
    """The architecture that a network is written as; see `options_from`."""
    families = {family.architecture: family for family in FAMILIES}
    if architecture is not None and architecture not in families:
        raise ValueError(
            f"architecture={architecture!r} is not supported: choose among {', '.join(families)}."
        )
    if config.head == "value":
        raise ValueError('head="value" (a critic) has no Hugging Face architecture.')
    if architecture is not None:
        lacking = {architecture: _lost_fields(config, families[architecture])}
    else:
        lacking = _lost_fields_by_architecture(config)
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    if lacking[nearest]:
        lost = ", ".join(f"{name}={getattr(config, name)!r}" for name in lacking[nearest])
        fold = "; fold_embedding_scale sets embedding_scale to 1"
        raise ValueError(
            f"{nearest} does not support {lost}"
            + ("" if architecture else ", and no other architecture supports more of this model")
            + (fold if "embedding_scale" in lacking[nearest] else "")
            + "."
        )
    return families[nearest]


def _lost_fields_by_architecture(config: ModelConfig) -> dict[str, list[str]]:
    """`_lost_fields` for every architecture that can read at all what is written for it."""
    lacking: dict[str, list[str]] = {}
    for family in FAMILIES:
        with contextlib.suppress(ValueError):
            lacking[family.architecture] = _lost_fields(config, family)
    if not lacking:
        raise ValueError(
            f"no architecture supports this model; rope_scaling={config.rope_scaling} may be the "
            "reason."
        )
    return lacking


def _fits(value: Any, annotation: Any) -> bool:
    """True if a value has the type of a field."""
    options = get_args(annotation)
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        return any(_fits(value, option) for option in options)
    if get_origin(annotation) is Literal:
        return value in options
    if annotation is float:
        return type(value) in (int, float) and -math.inf < value < math.inf
    if annotation is int:
        return type(value) is int and 0 <= value < 2**31
    if get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_fits(x, options[0]) for x in value)
    if type(value) is not annotation:
        return False
    hints = get_type_hints(annotation) if is_dataclass(annotation) else {}
    return all(_fits(getattr(value, name), hint) for name, hint in hints.items())


def _family(options: Options) -> Family:
    kind = options.take("model_type", default=None)
    by_name = {name: each for each in FAMILIES for name in (each.model_type, *each.also)}
    if isinstance(kind, str) and kind in by_name:
        return by_name[kind]
    supported = f"one of {', '.join(by_name)}"
    part = options.values.get("text_config")
    part_kind = part.get("model_type") if isinstance(part, dict) else None
    if isinstance(part_kind, str) and part_kind in by_name:
        supported = (
            f"the text network in it alone (text_config, model_type={part_kind!r}), saved as a "
            "checkpoint of its own"
        )
    raise options.unsupported("model_type", kind, supported)


def _write_options(config: ModelConfig, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **write_groups(COMMON, config),
        **write_groups(family.option_groups, config),
    }


def _lost_fields(config: ModelConfig, family: Family) -> list[str]:
    """Fields that come back changed when the network is written as `family` and read again."""
    options = Options(_write_options(config, family), f"a {family.model_type} configuration")
    # Not made a ModelConfig of: an architecture may read what it cannot express as nonsense.
    read_back = {
        **vars(_network(ModelConfig(1))),
        **read_groups((*COMMON, *family.option_groups), options),
    }
    expected = vars(_network(config))
    return [n for n, v in expected.items() if n not in TRAINING and read_back[n] != v]


def _network(config: ModelConfig) -> ModelConfig:
    """The configuration, with defaults for fields that do not change the network."""
    default = {field.name: field.default for field in fields(ModelConfig)}
    # A softmax over the chosen logits is the softmax over all, renormalised.
    names = ("softmax_after_topk",) if config.num_experts else ROUTING
    return replace(config, **{name: default[name] for name in names})
