"""The rotary options of a config.json: ``rope_parameters``, or ``rope_theta`` with
``rope_scaling`` as files had them before."""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from moe.architecture.rope import LinearScaling, LlamaScaling, RopeScaling, YarnScaling
from moe.config import ModelConfig
from moe.huggingface.family import Fields, OptionGroup
from moe.huggingface.options import Options
from moe.huggingface.shared_options import FULL, SLIDING

_ORIGINAL = "original_max_position_embeddings"
_LLAMA = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": _ORIGINAL,
}
_YARN = {
    "factor": "factor",
    "original_context": _ORIGINAL,
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "rotary_temperature": "mscale",
    "score_temperature": "mscale_all_dim",
    "truncate": "truncate",
}
_KINDS = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (LlamaScaling, _LLAMA),
    "yarn": (YarnScaling, _YARN),
}
_BOUNDED = ("llama3", "yarn")
"""Kinds that need the length the network was first trained for."""


def rotary(
    default_base: float = 10_000.0, temperatures: bool = False, partial: bool = False
) -> OptionGroup:
    """Fields of `ModelConfig` about rotary positions.

    Reading raises a `ValueError` for a kind of scaling, or one of its options, that is not
    supported.

    Args:
      default_base: base of the wavelengths, if the options say none.
      temperatures: true if the architecture has DeepSeek's ``mscale`` options.
      partial: whether it rotates a part of a head, as `rotary_dim` reads.
    """

    def read(options: Options, fields: Fields) -> Fields:
        parameters = _rope_parameters(options)
        base = _inside_or_beside(options, parameters, "rope_theta", default_base)
        return {
            "rope_base": to_float_base(base),
            "rope_scaling": _read_scaling(options, parameters, temperatures, partial),
        }

    return OptionGroup(read, write_rotary)


def rotary_by_window(default_base: float, window_base: float | None = None) -> OptionGroup:
    """`rotary` where layers with a window have a base of their own and are not stretched.

    Args:
      default_base: base of layers that have no window.
      window_base: base of layers with a window, if the options have none; None is the base of the
        others.
    """

    def read(options: Options, fields: Fields) -> Fields:
        parameters = _rope_parameters(options)
        local = options.take("rope_local_base_freq", default=window_base)
        if not set(parameters) <= {FULL, SLIDING}:
            parameters = {FULL: parameters}
        full, sliding = (parameters.get(kind) or {} for kind in (FULL, SLIDING))
        for each in (full, sliding):
            if not isinstance(each, Mapping):
                raise options.unsupported(
                    "rope_parameters", parameters, "an object for each layer type"
                )
        base = _inside_or_beside(options, full, "rope_theta", default_base)
        scaling = _read_scaling(options, full)
        local = sliding.get("rope_theta", base if local is None else local)
        if _read_scaling(options, sliding) is not None:
            raise options.unsupported("rope_parameters", parameters, f"no scaling for {SLIDING}")
        same = local == base and scaling is None
        return {
            "rope_base": to_float_base(base),
            "rope_scaling": scaling,
            **({} if same else {"window_rope_base": to_float_base(local)}),
        }

    return OptionGroup(read, _write_rotary_by_window)


def rotary_dim(default: float = 1.0) -> OptionGroup:
    """The fraction of a head that is rotated, `default` where the options say none."""

    def read(options: Options, fields: Fields) -> Fields:
        name, parameters = "partial_rotary_factor", _rope_parameters(options)
        fraction = _inside_or_beside(options, parameters, name, default)
        dim = int(fields["head_dim"] * fraction)
        return {} if dim == fields["head_dim"] else {"rotary_dim": dim}

    def write(config: ModelConfig) -> dict[str, Any]:
        dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
        return {"partial_rotary_factor": dim / config.head_dim}

    return OptionGroup(read, write)


def to_float_base(base: Any) -> Any:
    """A base as a float, or unchanged if it is not an integer that a float can hold; the caller
    reports it."""
    return float(base) if type(base) is int and abs(base) < 2**1023 else base


def _rope_parameters(options: Options) -> Mapping[str, Any]:
    parameters = options.take("rope_parameters", default=None)
    # Older versions read the scaling under this name alone, and exports have both.
    scaling = options.take("rope_scaling", default=None)
    if parameters is None:
        parameters = scaling or {}
    elif isinstance(scaling, Mapping) and isinstance(parameters, Mapping):
        _check_same_scaling(options, parameters, scaling)
    if not isinstance(parameters, Mapping):
        raise options.unsupported("rope_parameters", parameters, "a JSON object")
    original = options.take(_ORIGINAL, default=None)
    if original is not None and parameters.get("rope_type", parameters.get("type")) in _BOUNDED:
        return {**parameters, _ORIGINAL: original}  # the one beside them counts
    return parameters


def _check_same_scaling(
    options: Options, parameters: Mapping[str, Any], scaling: Mapping[str, Any]
) -> None:
    if not options.states("rope_scaling"):
        return
    of_full = parameters.get(FULL, parameters)
    kinds = [each.get("rope_type", each.get("type")) for each in (of_full, scaling)]
    names = (of_full.keys() & scaling.keys()) - {"rope_type", "type"}
    if kinds[0] != kinds[1] or any(of_full[name] != scaling[name] for name in names):
        raise ValueError(
            f"{options.source} has rope_parameters={of_full!r} and rope_scaling={scaling!r}, which "
            "are one option: keep one of them."
        )


def _inside_or_beside(
    options: Options, parameters: Mapping[str, Any], name: str, default: Any
) -> Any:
    """An option that is among the RoPE parameters or beside them; refuses two different values."""
    beside, inside = options.take(name, default=None), parameters.get(name)
    if None not in (beside, inside) and beside != inside:
        raise ValueError(
            f"{options.source} has {name}={beside!r} and, in the RoPE parameters, {inside!r}: keep "
            "one of them."
        )
    return default if beside is inside is None else beside if inside is None else inside


def _read_scaling(
    options: Options,
    parameters: Mapping[str, Any],
    temperatures: bool = False,
    partial: bool = False,
) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    others = {"rope_theta", "rope_type", "type"} | ({"partial_rotary_factor"} if partial else set())
    rest = {
        name: value
        for name, value in parameters.items()
        if name not in others and value is not None
    }
    if kind != "default" and not (isinstance(kind, str) and kind in _KINDS):
        raise options.unsupported("rope_type", kind, f"default, {', '.join(_KINDS)}")
    record, names = _KINDS.get(kind, (None, {}))
    fields = {
        field: _as_declared(record, field, rest[name])
        for field, name in names.items()
        if name in rest
    }
    supported = set(names.values()) - (set() if temperatures else {"mscale", "mscale_all_dim"})
    if missing := {"factor", _ORIGINAL} & supported - set(rest):
        raise options.unsupported(
            "rope_scaling", parameters, f"parameters with {', '.join(sorted(missing))}"
        )
    if unknown := set(rest) - supported:
        raise options.unsupported(
            "rope_scaling", parameters, f"parameters without {', '.join(sorted(unknown))}"
        )
    return None if record is None else record(**fields)


def _as_declared(record: Any, field: str, value: Any) -> Any:
    """A number as the field of a scaling is declared: files write 32 for 32.0."""
    declared = get_type_hints(record)[field]
    is_float = declared is float or float in get_args(declared)
    return float(value) if is_float and type(value) is int else value


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """Options that `rotary` reads, in the form that every version of `transformers` reads."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_base, "rope_scaling": None}
    kind, names = next(
        (kind, names) for kind, (record, names) in _KINDS.items() if isinstance(scaling, record)
    )
    values = {name: getattr(scaling, field) for field, name in names.items()}
    parameters = {name: value for name, value in values.items() if value is not None}
    return {
        "rope_theta": config.rope_base,
        "rope_scaling": {"rope_type": kind, **parameters},
    }


def _write_rotary_by_window(config: ModelConfig) -> dict[str, Any]:
    """The options that `rotary_by_window` reads, in the words of old versions of `transformers` and
    of new ones, which do not read the old words of windows."""
    plain, local = write_rotary(config), config.window_rope_base
    local = config.rope_base if local is None else local
    return {
        **plain,
        "rope_parameters": {
            FULL: {
                "rope_type": "default",
                "rope_theta": config.rope_base,
                **(plain["rope_scaling"] or {}),
            },
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }
