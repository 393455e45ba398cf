"""Description of one `transformers` architecture, for reading and writing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.config import ModelConfig
from moe.huggingface.options import Options

Fields = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A tensor that is not as `moe.huggingface.tensors` finds others from their names alone.

    Args:
      name: of the tensor.
      dimensions: the axes that each of its dimensions is made of, dimensions parted by commas; one
        tensor holds all that these say, experts and halves included. None is as others are.
      offset: added to its numbers to make ours: 1 of a norm that multiplies by ``1 + w``.
    """

    name: str
    dimensions: str | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      architecture: its class in `transformers`.
      model_type: its name in config.json.
      read: fields of `ModelConfig` out of the options that are its own.
      write: the same options from a configuration.
      names: of the tensors of a layer that are its own, by the path of the weight in `Layer`.
      last_norm: the last one, before the head.
      also: other names in config.json of the same architecture, which it is not written under.
      predicts_further: a file may hold layers that predict further tokens, after the network's own
        or under ``mtp.``, which are left out.
      defaults: values of common options that a file leaves out, where no other function has them.
    """

    architecture: str
    model_type: str
    read: Callable[[Options, Fields], Fields]
    write: Callable[[ModelConfig], dict[str, Any]]
    names: Mapping[str, str | Stored]
    last_norm: Stored = Stored("model.norm.weight")
    also: tuple[str, ...] = ()
    predicts_further: bool = False
    fused_in_peft: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
