"""Description of one `transformers` architecture: its options and the names of its tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.config import ModelConfig
from moe.huggingface.options import Options

Fields = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A tensor that is not as `moe.huggingface.tensors` finds others from their names alone.

    Args:
      name: name of the tensor.
      dimensions: the axes that each of its dimensions is made of, dimensions parted by commas; one
        tensor holds all that these say, experts and halves included. None is as others are.
      offset: added to its numbers to make ours: 1 of a norm that multiplies by ``1 + w``.
    """

    name: str
    dimensions: str | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class OptionGroup:
    """Options of one subject, in both directions.

    Args:
      read: fields of `ModelConfig`, from the options and the fields that were read before.
      write: the options from a configuration; None if they cannot express it.
    """

    read: Callable[[Options, Fields], Fields]
    write: Callable[[ModelConfig], dict[str, Any] | None] = lambda config: {}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      architecture: its class in `transformers`.
      model_type: its name in config.json.
      option_groups: its own options.
      names: names of the tensors of a layer that are its own, by the path of the weight in `Layer`.
      last_norm: the last one, before the head.
      also: other names in config.json of the same architecture, which it is not written under.
      predicts_further: a file may hold layers that predict further tokens, after the network's own
        or under ``mtp.``, which are left out.
      fused_in_peft: whether PEFT takes dense projections for projections of experts, see
        `moe.huggingface.adapters`.
      defaults: values of common options that a file leaves out, if no other function has them.
    """

    architecture: str
    model_type: str
    option_groups: tuple[OptionGroup, ...]
    names: Mapping[str, str | Stored]
    last_norm: Stored = Stored("model.norm.weight")
    also: tuple[str, ...] = ()
    predicts_further: bool = False
    fused_in_peft: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_groups(groups: Iterable[OptionGroup], options: Options) -> Fields:
    """Fields of `ModelConfig`; each group gets the fields of the groups before it."""
    fields: Fields = {}
    for group in groups:
        fields |= group.read(options, fields)
    return fields


def write_groups(groups: Iterable[OptionGroup], config: ModelConfig) -> dict[str, Any]:
    """The options that `read_groups` reads; none if a group cannot express the configuration."""
    options: dict[str, Any] = {}
    for group in groups:
        written = group.write(config)
        if written is None:
            return {}
        options |= written
    return options


def expert_names(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of a layer's tensors of experts, by the path of the weight in `Layer`."""
    named = {"experts.gate": gate, "experts.up": up, "experts.down": down}
    weights = {path: f"{prefix}.experts.{{expert}}.{name}.weight" for path, name in named.items()}
    return {"experts.router": f"{prefix}.gate.weight", **weights}


def dense_names(prefix: str) -> dict[str, str]:
    return {f"dense.{name}": f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")}


def plus_one(norms: Mapping[str, str]) -> dict[str, Stored]:
    """Norms that multiply by ``1 + w``, by the path of the weight."""
    return {path: Stored(name, offset=1.0) for path, name in norms.items()}


PROJECTED_EXPERTS = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
QUERY_KEY_NORMS = {
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
QKV_BIASES = {
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_bias": "self_attn.k_proj.bias",
    "attention.value_bias": "self_attn.v_proj.bias",
}
COMMON_NAMES = {
    "attention.norm": "input_layernorm.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "norm": "post_attention_layernorm.weight",
    **dense_names("mlp"),
}
"""Tensors of a layer that most architectures name alike."""
NORMS_AFTER = {
    "attention.norm": "post_attention_layernorm.weight",
    "norm": "post_feedforward_layernorm.weight",
}
SELECTION_BIAS = {"experts.bias": "mlp.gate.e_score_correction_bias"}
LATENT_ATTENTION = {
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_norm": "self_attn.q_a_layernorm.weight",
    "attention.query": "self_attn.q_b_proj.weight",
    "attention.down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.down_norm": "self_attn.kv_a_layernorm.weight",
    "attention.up": "self_attn.kv_b_proj.weight",
    **SELECTION_BIAS,
}
