"""GGUF files made of checkpoints, by llama.cpp's rules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA = {
    **LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def theirs(kind: str, config: Mapping[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint as GGUF has them."""
    tensors: dict[str, Any] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        base, _, last = name.rpartition(".")
        if base in OUTSIDE:
            key = OUTSIDE[base]
        else:
            _, _, layer, inner = base.split(".", 3)
            if ".experts." in inner:
                _, _, expert, part = inner.split(".")
                short = LAYER[f"mlp.{part}"]
                stacks.setdefault(f"blk.{layer}.{short}_exps.weight", {})[int(expert)] = values
                continue
            key = f"blk.{layer}.{(GEMMA if kind == 'gemma3' else LAYER)[inner]}"
            if kind == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config[
                    "num_attention_heads" if "q_proj" in inner else "num_key_value_heads"
                ]
                # Pairs of a rotation are half a head apart there, and neighbours here.
                values = np.stack(np.split(values.reshape(heads, -1, values.shape[-1]), 2, 1), 2)
                values = values.reshape(-1, values.shape[-1])
        if kind == "gemma3" and "norm" in base:
            values = values + np.float32(1.0)
        tensors[f"{key}.{last}"] = values
    for key, experts in stacks.items():
        tensors[key] = np.stack([experts[index] for index in range(len(experts))])
    return tensors


def write_gguf(
    path: Path,
    kind: str,
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes the GGUF file of a checkpoint and returns its tensors before they are quantised.

    Args:
      metadata: more of it, below the name of the architecture.
      quantised: of the matrices; None keeps float32.
      more: tensors that the checkpoint does not have.
      vocabulary: entries below "tokenizer.", in place of a few tokens.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim", 8))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    for name, value in (metadata or {}).items():
        writer.add_key_value(f"{kind}.{name}", value, _value_type(value))
    for name, value in (vocabulary or few_tokens()).items():
        writer.add_key_value(f"tokenizer.{name}", value, _value_type(value), _item_type(value))
    tensors = theirs(kind, config, folder) | dict(more or {})
    for name, values in tensors.items():
        if quantised is not None and values.ndim > 1:
            rows = gguf.quantize(values, quantised)
            writer.add_tensor(name, rows, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def few_tokens() -> dict[str, Any]:
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": ["a", "b", "</s>", "ab"],
        "ggml.token_type": [1, 1, 3, 1],
        "ggml.merges": ["a b"],
        "ggml.eos_token_id": 2,
    }


def _value_type(value: Any) -> gguf.GGUFValueType:
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[types[type(value)]]


def _item_type(value: Any) -> gguf.GGUFValueType | None:
    return _value_type(value[0]) if isinstance(value, list) else None
