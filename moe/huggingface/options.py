"""Reader of the options of a config.json, which are taken one by one so that none stays unread."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moe.huggingface.json_file import parse_json

WITHOUT_EFFECT = {
    # Files and the programs that wrote them.
    *("_name_or_path", "_commit_hash", "architectures", "auto_map", "custom_pipelines"),
    *("model_type", "tokenizer_class", "transformers_version", "transformers.js_config"),
    *("unsloth_version", "unsloth_fixed", "unsloth_template", "library_name", "license"),
    *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id"),
    *("is_llama_config", "model_name", "name_or_path", "pipeline_tag", "tags"),
    # Tokens.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "prefix"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "image_token_id"),
    # Generation.
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
    *("num_beam_groups", "diversity_penalty", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_return_sequences"),
    *("encoder_no_repeat_ngram_size", "remove_invalid_values", "output_scores"),
    *("exponential_decay_length_penalty", "return_dict_in_generate", "cache_implementation"),
    *("use_cache", "max_new_tokens", "generation_config"),
    # Training.
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
    *("initializer_range", "init_std", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
    *("router_jitter_noise", "output_router_logits", "num_nextn_predict_layers"),
    *("gradient_checkpointing", "pretraining_tp", "z_loss", "tf_legacy_loss"),
    # How a library computes what is the same network.
    *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
    *("_experts_implementation", "_flash_attn_2_enabled", "attn_implementation"),
    *("use_flash_attn", "use_flash_attention", "torchscript", "use_bfloat16", "torch_dtype"),
    *("dtype", "ep_size", "base_model_tp_plan", "base_model_pp_plan", "tp_plan"),
    *("chunk_size_feed_forward", "return_dict", "output_attentions", "output_hidden_states"),
    # What follows from other options, or bounds what is not checked here.
    *("max_position_embeddings", "max_window_layers", "qk_head_dim", "max_sequence_length"),
    *("model_max_length", "seq_length", "is_decoder", "tie_encoder_decoder"),
    *("cross_attention_hidden_size", "use_return_dict"),
}
"""Options that change no logit."""
GENERATION = {
    *("min_new_tokens", "min_p", "max_time", "stop_strings", "penalty_alpha", "top_h"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "guidance_scale", "low_memory"),
    *("force_words_ids", "forced_decoder_ids", "sequence_bias", "constraints", "token_healing"),
    *("dola_layers", "watermarking_config", "cache_config", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens"),
    *("assistant_confidence_threshold", "assistant_early_exit", "is_assistant", "output_logits"),
    *("disable_compile", "compile_config", "use_model_defaults", "prefill_chunk_size"),
}
"""Further defaults of generation: names of the `GenerationConfig` of `transformers`."""
TOKEN_ENDS = ("_token_id", "_token_ids", "_token_index")
"""Ends of the names of options that name a token."""

REQUIRED = object()
"""Default of an option that a file must have."""


class Options:
    """Options of a checkpoint, and their file, for messages. Each is taken once; `finish`
    rejects those that were not taken."""

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Collection[str] = ()):
        self.values, self.source, self._consumed = values, source, set[str]()
        self._defaults = defaults  # names whose values the file does not state

    @classmethod
    def read(cls, path: Path) -> "Options":
        """Reads the options of a config.json.

        Raises:
          ValueError: there is no such file, or it holds no options.
        """
        try:
            values = parse_json(path.read_bytes())
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

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Options":
        """The same options, none of them taken, with values for those that are not there."""
        return Options({**defaults, **self.values}, self.source, defaults.keys() - self.values)

    def take(self, *names: str, default: Any = REQUIRED) -> Any:
        """The option under the first of its names that is there.

        Raises:
          ValueError: it has no default and is not there, or is there under two names with
            different values.
        """
        self.pass_over(*names)
        present = {name: self.values[name] for name in names if name in self.values}
        stated = {name: v for name, v in present.items() if self.states(name)} or present
        if not stated:
            if default is REQUIRED:
                raise ValueError(f"{self.source} lacks the option {' or '.join(names)}.")
            return default
        values = [value for value in stated.values() if value is not None]
        if any(value != values[0] for value in values):
            listed = " and ".join(f"{name}={value!r}" for name, value in stated.items())
            raise ValueError(f"{self.source} has {listed}, which are one option: keep one of them.")
        return values[0] if values else None

    def states(self, name: str) -> bool:
        """True if the file has an option, and not a default alone."""
        return name in self.values and name not in self._defaults

    def pass_over(self, *names: str) -> None:
        """Takes options whose values do not matter."""
        self._consumed.update(names)

    def require(self, name: str, *accepted: Any, default: Any = None) -> None:
        """Takes an option of which only some values are supported, `default` being its value when
        absent."""
        value = self.take(name, default=default)
        if value not in accepted:
            raise self.unsupported(name, value, " or ".join(map(repr, accepted)))

    def unsupported(self, name: str, value: Any, accepted: str) -> ValueError:
        return ValueError(
            f"{self.source}: {name}={value!r} is not supported; supported: {accepted}."
        )

    def not_fitting(self, why: str) -> ValueError:
        return ValueError(f"{self.source} is not valid: {why}; use the checkpoint's file.")

    def unread(self) -> dict[str, Any]:
        """Options that were not taken and are not known."""
        names = sorted(set(self.values) - self._consumed - WITHOUT_EFFECT)
        return {name: self.values[name] for name in names}

    def idle(self) -> dict[str, Any]:
        """Options that were not taken and are not known, but change no logit: they are off (false,
        null or empty), begin with an underscore, name a token or are a default of generation."""
        return {name: v for name, v in self.unread().items() if _is_off(v) or _is_idle(name)}

    def finish(self, ignore: Collection[str] = (), remedy: str = "") -> None:
        """Refuses options that were not taken and are not known, unless they are `idle`.

        Args:
          ignore: those that are passed over in any case.
          remedy: the sentence that ends the message, of what to do.
        """
        passed_over = {*ignore, *self.idle()}
        rest = {name: v for name, v in self.unread().items() if name not in passed_over}
        if rest:
            listed = ", ".join(f"{name}={value!r}" for name, value in rest.items())
            raise ValueError(
                f"{self.source} has options that are not supported: {listed}. {remedy}".rstrip()
            )


def _is_idle(name: str) -> bool:
    # `transformers` begins the names of its own attributes with an underscore.
    return name.startswith("_") or name.endswith(TOKEN_ENDS) or name in GENERATION


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
