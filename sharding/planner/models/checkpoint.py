"""The sizes that a checkpoint's config.json states, in the words of `transformers`."""

import json
from pathlib import Path
from typing import Any

from sharding.planner.models.sizes import ModelSizes

TIED_MODEL_TYPES = ("gemma3_text", "smollm3")
"""Architectures whose head is the embedding where the file does not say."""


def sizes_from(path: str | Path) -> ModelSizes:
    """The sizes of a checkpoint.

    Args:
      path: the checkpoint's directory, or its config.json.

    Raises:
      ValueError: where the file is none of settings, sizes are missing, or attention is multi-head
        latent attention.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: use the config.json of a checkpoint.") from error
    if not isinstance(options, dict):
        raise ValueError(
            f"{path} holds a {type(options).__name__}, not a model config: use the config.json "
            "of a checkpoint."
        )
    if options.get("kv_lora_rank") is not None:
        raise ValueError(
            f"{path}: kv_lora_rank={options['kv_lora_rank']} is latent attention (MLA), which "
            "the planner does not support."
        )
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in names if name not in options]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it must be the config.json of a decoder."
        )
    heads, d_model = options["num_attention_heads"], options["hidden_size"]
    return ModelSizes(
        num_layers=options["num_hidden_layers"],
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=options.get("num_key_value_heads") or heads,
        head_dim=options.get("head_dim") or d_model // heads,
        vocab_size=options["vocab_size"],
        tied=bool(
            options.get("tie_word_embeddings", options.get("model_type") in TIED_MODEL_TYPES)
        ),
        **_feed_forward(options),
    )


def _feed_forward(options: dict[str, Any]) -> dict[str, int]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((options[name] for name in names if options.get(name)), 0)
    dense = options.get("intermediate_size", 0)
    if not num_experts:
        return {"d_ff": dense}
    width = options.get("moe_intermediate_size") or dense
    shared = options.get("shared_expert_intermediate_size") or 0
    shared = shared or (options.get("n_shared_experts") or 0) * width
    return {
        "num_experts": num_experts,
        "experts_per_token": options["num_experts_per_tok"],
        "d_expert": width,
        "d_ff": shared,
        "num_dense_layers": options.get("first_k_dense_replace") or 0,
        "dense_d_ff": dense if options.get("first_k_dense_replace") else 0,
    }
