"""config.json of a GGUF file: each metadata entry is converted, ignored or rejected.

Names follow https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and their meanings and
defaults follow llama.cpp.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.published.gguf_file import GgufFile
from moe.huggingface.dense_families import GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from moe.huggingface.family import Family
from moe.huggingface.moe_families import QWEN3_MOE
from moe.huggingface.options import Options

FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3moe": QWEN3_MOE, "gemma3": GEMMA3}
"""Families by `general.architecture` of GGUF; a `llama` with a window in every layer is MISTRAL."""
LLAMA3_FACTORS = (8.0, 32.0)
"""RoPE scaling factors of Llama 3.1 and 3.2; GGUF has only the resulting frequencies."""
GEMMA3_PERIOD = 6
"""Every sixth layer of Gemma 3 attends to the whole sequence."""
GEMMA3_LARGEST = 62
"""Layers of Gemma 3 27B, whose attention scale is computed from the width over the heads."""
HALF_PRECISION = (1, 30)
"""Numbers of the types float16 and bfloat16."""

WITHOUT_EFFECT = (
    "vocab_size",  # the embedding has it
    "attention.layer_norm_epsilon",  # these architectures have RMSNorm only
    "pooling_type",
    "rope.scaling.finetuned",
    "embedding_length_out",
)
"""Metadata that do not affect the logits of these architectures."""
ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (1.0, 0.0),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
    "expert_gating_func": (1, 0),  # softmax
    "expert_weights_scale": (1.0, 0.0),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (1, 0),
    "expert_group_used_count": (1, 0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (1, 0),
    "moe_every_n_layers": (1, 0),
    "nextn_predict_layers": (0,),
}
"""Metadata that affect the network, with the values at which they have no effect."""
WITHOUT_EXPERTS = {"expert_count": (0,), "expert_used_count": (0,)}
"""`ONE_VALUE` of the architectures without experts."""
REMEDY = "Pass over those that have no effect: --ignore-options NAME."


@dataclass(frozen=True)
class Metadata:
    """Metadata of the architecture, read by their names without the prefix."""

    kind: str
    options: Options

    def get(self, name: str, default: Any) -> Any:
        """The value of ``KIND.name``; a list of equal values for each layer is one of them."""
        value = self.options.take(f"{self.kind}.{name}", default=default)
        if not isinstance(value, list) or name == "attention.sliding_window_pattern":
            return value
        if not value or any(each != value[0] for each in value):
            raise self.unsupported(name, value, "the same value for each layer")
        return value[0]

    def require(self, name: str) -> Any:
        """The required value of ``KIND.name``."""
        value = self.get(name, None)
        if value is None:
            self.options.take(f"{self.kind}.{name}")  # raises, with the name
        return value

    def check_equal(self, name: str, expected: float | int) -> None:
        """Rejects a value that is present and differs from the one implied by others."""
        value = self.get(name, expected)
        if not np.isclose(value, expected, rtol=1e-5, atol=0):
            raise self.unsupported(name, value, repr(expected))

    def unsupported(self, name: str, value: Any, accepted: str) -> ValueError:
        return self.options.unsupported(f"{self.kind}.{name}", value, accepted)


def config_options(
    file: GgufFile, source: str = "GGUF", ignore: Collection[str] = ()
) -> dict[str, Any]:
    """The config.json of a GGUF file.

    Unknown metadata that are off (false or empty) or ignored are included under their own names, so
    that they are reported to its reader.

    Args:
      source: path of the file, for error messages.
      ignore: names of metadata without effect, as stated by the user.

    Raises:
      ValueError: for an unsupported architecture, metadata with unsupported values, and unknown
        metadata.
    """
    kind = file.metadata.get("general.architecture")
    if (type_ := file.metadata.get("general.type", "model")) != "model":
        raise ValueError(f"{source}: general.type={type_!r} is not supported; supported: 'model'.")
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"{source} is one of {parts} parts of a model: join them first, with "
            "llama-gguf-split --merge of llama.cpp."
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"{source}: general.architecture={kind!r} is not supported; supported: "
            f"{', '.join(FAMILIES)}."
        )
    stated = {name: v for name, v in file.metadata.items() if name.startswith(f"{kind}.")}
    metadata = Metadata(kind, Options(stated, source))
    options = _sizes(file, metadata)
    if kind == "qwen3moe":
        options |= _experts(metadata)
    if kind == "gemma3":
        options |= {"hidden_activation": "gelu_pytorch_tanh", **_gemma3(metadata, options)}
    else:
        options |= {**_attention(metadata, options), "hidden_act": "silu"}
    if (scaling := _rope_scaling(file, metadata, options)) is not None:
        options["rope_scaling"] = scaling
    without_experts = {} if kind == "qwen3moe" else WITHOUT_EXPERTS
    for name, accepted in {**ONE_VALUE, **without_experts}.items():
        metadata.options.require(f"{kind}.{name}", *accepted, default=accepted[0])
    metadata.options.pass_over(*(f"{kind}.{name}" for name in WITHOUT_EFFECT))
    metadata.options.finish(ignore, REMEDY)
    return options | metadata.options.unread()


def _sizes(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    num_heads = metadata.require("attention.head_count")
    width = metadata.require("embedding_length")
    rotated = metadata.get("rope.dimension_count", width // num_heads)
    head_dim = metadata.get("attention.key_length", rotated)
    metadata.check_equal("attention.value_length", head_dim)
    metadata.check_equal("rope.dimension_count", head_dim)
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    is_half = all(tensor.kind in HALF_PRECISION for tensor in matrices)
    return {
        **_named(FAMILIES[metadata.kind]),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": metadata.require("feed_forward_length"),
        "num_hidden_layers": metadata.require("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.require("context_length"),
        "rms_norm_eps": _shortest(metadata.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16" if is_half else "float32",
        **_token_ids(file.metadata),
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.require("expert_count"),
        "num_experts_per_tok": metadata.require("expert_used_count"),
        "moe_intermediate_size": metadata.require("expert_feed_forward_length"),
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _attention(metadata: Metadata, options: Mapping[str, Any]) -> dict[str, Any]:
    """Scale of the scores and sliding window, of architectures other than Gemma 3."""
    if metadata.get("attention.scale", 0.0):
        metadata.check_equal("attention.scale", options["head_dim"] ** -0.5)
    window = metadata.get("attention.sliding_window", 0)
    pattern = metadata.get("attention.sliding_window_pattern", None)
    if not window or window >= options["max_position_embeddings"]:
        return {}
    if metadata.kind != "llama":
        raise metadata.unsupported("attention.sliding_window", window, "0, for none")
    if pattern not in (None, 0, 1):
        raise metadata.unsupported("attention.sliding_window_pattern", pattern, "1")
    return {**_named(MISTRAL), "sliding_window": window}


def _named(family: Family) -> dict[str, Any]:
    return {"architectures": [family.architecture], "model_type": family.model_type}


def _gemma3(metadata: Metadata, options: Mapping[str, Any]) -> dict[str, Any]:
    head_dim, num_layers = options["head_dim"], options["num_hidden_layers"]
    scalar = head_dim
    if num_layers == GEMMA3_LARGEST:
        scalar = options["hidden_size"] // options["num_attention_heads"]
    if scale := metadata.get("attention.scale", 0.0):
        scalar = round(scale**-2)
        metadata.check_equal("attention.scale", scalar**-0.5)
    pattern = metadata.get("attention.sliding_window_pattern", GEMMA3_PERIOD)
    local = metadata.get("rope.freq_base_swa", 10_000.0)
    window = {
        "sliding_window": metadata.require("attention.sliding_window"),
        "rope_local_base_freq": _shortest(local),
        "query_pre_attn_scalar": scalar,
    }
    if not isinstance(pattern, list):
        return {**window, "sliding_window_pattern": pattern}
    if len(pattern) != num_layers:
        raise metadata.unsupported("attention.sliding_window_pattern", pattern, "one per layer")
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {**window, "layer_types": kinds}


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {
        ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()
    }
    return {name: int(value) for name, value in ids.items() if value is not None}


def _rope_scaling(
    file: GgufFile, metadata: Metadata, options: Mapping[str, Any]
) -> dict[str, Any] | None:
    former = metadata.get("rope.scale_linear", 1.0)  # in files from before 2024
    # llama.cpp's default kind.
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.get("rope.scaling.factor", former) or 1.0
    original = metadata.get("rope.scaling.original_context_length", None)
    yarn = {
        "attention_factor": metadata.get("rope.scaling.yarn_attn_factor", None),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", None),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", None),
    }
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file.values("rope_freqs.weight"), options, metadata.options)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if original is None:
            original = metadata.require("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **{name: _shortest(value) for name, value in yarn.items() if value is not None},
        }
    raise metadata.unsupported("rope.scaling.type", kind, "none, linear, yarn")


def _llama3_scaling(
    divisors: np.ndarray, options: Mapping[str, Any], source: Options
) -> dict[str, Any]:
    """The RoPE scaling of Llama 3, recognised by the divisors that it gives the frequencies."""
    for factor in LLAMA3_FACTORS:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = llama3_divisors(scaling, options["rope_theta"], options["head_dim"])
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{source.source}: rope_freqs.weight is the RoPE scaling of no Llama 3, and is not "
        "supported."
    )


def llama3_divisors(scaling: Mapping[str, Any], base: float, head_dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, of Llama 3's scaling."""
    frequencies = base ** -(np.arange(0, head_dim, 2) / head_dim)
    rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    unscaled = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - unscaled) / scaling["factor"] + unscaled)
