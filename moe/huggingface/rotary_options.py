"""The rotary options of a config.json: ``rope_parameters``, or ``rope_theta`` with
``rope_scaling`` as files had them before."""

from collections.abc import Mapping
from typing import Any

from moe.attention.rotary import LlamaScaling, RopeScaling, YarnScaling
from moe.config import ModelConfig
from moe.huggingface.options import Options

_LLAMA = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
_YARN = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "rotary_temperature": "mscale",
    "score_temperature": "mscale_all_dim",
    "truncate": "truncate",
}
_KINDS = {"llama3": (LlamaScaling, _LLAMA), "yarn": (YarnScaling, _YARN)}


def read_rotary(
    options: Options, default_base: float = 10_000.0, temperatures: bool = False
) -> dict[str, Any]:
    """Fields of `ModelConfig` about rotary positions.

    Args:
      default_base: of the wavelengths, where the options say none.
      temperatures: whether the architecture knows DeepSeek's ``mscale`` options.

    Raises:
      ValueError: for a kind of scaling, or one of its options, that is not supported.
    """
    given = options.take("rope_parameters", "rope_scaling", default=None) or {}
    if not isinstance(given, Mapping):
        raise options.unsupported("rope_parameters", given, "an object there")
    base = given.get("rope_theta", options.take("rope_theta", default=default_base))
    kind = given.get("rope_type", given.get("type", "default"))
    rest = {
        name: value
        for name, value in given.items()
        if name not in ("rope_theta", "rope_type", "type") and value is not None
    }
    if kind == "default":
        scaling: RopeScaling | None = None
        unknown = set(rest)
    elif isinstance(kind, str) and kind in _KINDS:
        record, names = _KINDS[kind]
        known = set(names.values()) - (set() if temperatures else {"mscale", "mscale_all_dim"})
        unknown = set(rest) - known
        fields = {field: rest[name] for field, name in names.items() if name in rest}
        missing = {"factor", "original_max_position_embeddings"} - set(rest)
        if missing:
            raise options.unsupported("rope_scaling", given, f"{', '.join(sorted(missing))} too")
        scaling = None if unknown else record(**fields)
    else:
        raise options.unsupported("rope_type", kind, f"default, {' and '.join(_KINDS)}")
    if unknown:
        raise options.unsupported(
            "rope_scaling", given, f"none of its {', '.join(sorted(unknown))}"
        )
    # As it is where it is no number, which the caller says.
    return {
        "rope_base": float(base) if type(base) is int and abs(base) < 2**1023 else base,
        "rope_scaling": scaling,
    }


def written_rotary(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_rotary` reads, as every version of `transformers` knows them."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_base, "rope_scaling": None}
    kind = "llama3" if isinstance(scaling, LlamaScaling) else "yarn"
    names = _KINDS[kind][1]
    values = {name: getattr(scaling, field) for field, name in names.items()}
    given = {name: value for name, value in values.items() if value is not None}
    return {
        "rope_theta": config.rope_base,
        "rope_scaling": {"rope_type": kind, **given},
    }
