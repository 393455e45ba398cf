"""Reader of the options of a config.json, which are taken one by one so that none stays unread."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "ep_size",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Options that change no logit: of files, of tokens, of training, of generation."""

_ABSENT = object()


class Options:
    """Options of a checkpoint. Each is taken once; `finish` rejects those that were not taken.

    Args:
      values: what config.json holds.
      source: where it was read, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self._values, self._source, self._consumed = values, source, set[str]()

    @classmethod
    def read(cls, path: Path) -> "Options":
        """Those of a config.json.

        Raises:
          ValueError: there is no such file, or it holds no options.
        """
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): use the directory of a checkpoint, "
                "with its config.json and .safetensors files."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object.")
        return cls(values, str(path))

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def take(self, *names: str, default: Any = _ABSENT) -> Any:
        """The option under the first of its names that is there.

        Raises:
          ValueError: it has no default and is not there.
        """
        self._consumed.update(names)
        for name in names:
            if name in self._values:
                return self._values[name]
        if default is _ABSENT:
            raise ValueError(f"{self._source} lacks the option {' or '.join(names)}.")
        return default

    def require(self, name: str, *accepted: Any, default: Any = None) -> None:
        """Takes an option of which only some values are supported, `default` being its value when
        absent."""
        value = self.take(name, default=default)
        if value not in accepted:
            raise self.unsupported(name, value, " or ".join(map(repr, accepted)))

    def unsupported(self, name: str, value: Any, accepted: str) -> ValueError:
        return ValueError(
            f"{self._source}: {name}={value!r} is not supported; supported: {accepted}."
        )

    def not_fitting(self, why: str) -> ValueError:
        return ValueError(f"{self._source} is not valid: {why}; use the checkpoint's file.")

    def finish(self) -> None:
        """Refuses options that were not taken and could change the network."""
        rest = sorted(set(self._values) - self._consumed - WITHOUT_EFFECT)
        if rest:
            listed = ", ".join(f"{name}={self._values[name]!r}" for name in rest)
            raise ValueError(
                f"{self._source} has options that are not supported: {listed}. Delete those from "
                "the file that have no effect."
            )
