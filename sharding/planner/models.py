"""Models as the planner sees them: their sizes, read from a checkpoint or published."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TIED_MODEL_TYPES = ("gemma3_text", "smollm3")
"""Architectures whose head is the embedding where the file does not say."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only transformer with grouped-query attention and SwiGLU.

    Args:
      num_layers: blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: width of a head.
      vocab_size: token ids.
      num_experts: experts of a layer; 0 makes every layer dense.
      experts_per_token: experts that a token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer, or of the shared expert; 0 is none.
      num_dense_layers: the first blocks, which have a dense layer in place of experts.
      dense_d_ff: hidden width of those.
      tied: logits come from the embedding.
      capacity_factor: experts take at most this multiple of what even routing sends them from one
        device; None drops nothing.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    d_ff: int = 0
    num_dense_layers: int = 0
    dense_d_ff: int = 0
    tied: bool = False
    capacity_factor: float | None = None

    def __post_init__(self):
        for name in (
            *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
            *(("experts_per_token", "d_expert") if self.num_experts else ("d_ff",)),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """Matrices of one attention layer."""
        return 2 * self.d_model * (self.queries + self.keys)

    @property
    def expert_parameters(self) -> int:
        """Matrices of the routed experts of one layer."""
        return 3 * self.num_experts * self.d_model * self.d_expert

    @property
    def parameters(self) -> int:
        """Numbers in all matrices and norms."""
        norms = 2 * self.num_layers * self.d_model + self.d_model
        embedding_and_head = self.vocab_size * self.d_model * (1 if self.tied else 2)
        num_main_layers = self.num_layers - self.num_dense_layers
        router = self.num_expert_layers * self.d_model * self.num_experts
        return (
            self.num_layers * self.attention_parameters
            + self.num_expert_layers * self.expert_parameters
            + 3
            * self.d_model
            * (num_main_layers * self.d_ff + self.num_dense_layers * self.dense_d_ff)
            + router
            + norms
            + embedding_and_head
        )

    @property
    def layer_width(self) -> int:
        """Hidden units per token in one of the layers after the dense first ones."""
        routed = self.experts_per_token * self.d_expert if self.num_experts else 0
        return routed + self.d_ff

    def training_flops(self, time: int) -> float:
        """Floating-point operations of one trained token in sequences of `time`.

        ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``, as
        `moe.counts.training_flops` counts them without windows, and Megatron-Core.
        """
        num_main_layers = self.num_layers - self.num_dense_layers
        width = num_main_layers * self.layer_width + self.num_dense_layers * self.dense_d_ff
        weights = self.num_layers * self.attention_parameters
        weights += 3 * self.d_model * width + self.d_model * self.vocab_size
        return 6.0 * (weights + self.num_layers * self.queries * time)


def sizes_from(path: str | Path) -> ModelSizes:
    """The sizes that a checkpoint's config.json states, in the words of `transformers`.

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


MIXTRAL_8X22B = ModelSizes(
    num_layers=56,
    d_model=6144,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32768,
    num_experts=8,
    experts_per_token=2,
    d_expert=16384,
)
MIXTRAL_8X7B = ModelSizes(
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    num_experts=8,
    experts_per_token=2,
    d_expert=14336,
)

PRESETS: dict[str, ModelSizes] = {
    "mixtral-8x22b": MIXTRAL_8X22B,
    # Each expert cut into eight, and eight chosen of the 64.
    "mixtral-8x22b-g8t8": replace(
        MIXTRAL_8X22B, num_experts=64, experts_per_token=8, d_expert=2048
    ),
    "llama3-8x70b": replace(
        MIXTRAL_8X22B,
        num_layers=80,
        d_model=8192,
        num_heads=64,
        vocab_size=128256,
        d_expert=28672,
    ),
    "qwen2-57b-a14b": ModelSizes(
        num_layers=28,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=64,
        experts_per_token=8,
        d_expert=2560,
        d_ff=20480,
    ),
    "mixtral-8x7b": MIXTRAL_8X7B,
    # Its name needs a shared expert as wide as the others, which the paper does not mention.
    "megascale-352b": replace(
        MIXTRAL_8X7B,
        num_layers=60,
        vocab_size=65536,
        num_experts=32,
        experts_per_token=3,
        d_ff=14336,
    ),
    "phi-3.5-moe": replace(
        MIXTRAL_8X7B, vocab_size=32064, num_experts=16, experts_per_token=2, d_expert=6400
    ),
    "qwen3-235b-a22b": replace(
        MIXTRAL_8X7B,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        vocab_size=151936,
        num_experts=128,
        experts_per_token=8,
        d_expert=1536,
    ),
    "dbrx": replace(
        MIXTRAL_8X22B,
        num_layers=40,
        vocab_size=100352,
        num_experts=16,
        experts_per_token=4,
        d_expert=10752,
    ),
    # The paper gives its name and 317 B parameters; these sizes come to that.
    "scaled-moe": replace(
        MIXTRAL_8X7B,
        num_layers=48,
        d_model=8192,
        num_heads=64,
        num_experts=32,
        experts_per_token=4,
        d_expert=8192,
    ),
}
"""Liu et al., "MoE Parallel Folding", 2025, section 4 (https://arxiv.org/abs/2504.14960); Jin et
al., "MegaScale-MoE", 2025, table 1 (https://arxiv.org/abs/2505.11432); Qwen3, 2025; Zhu
et al., "MegaScale-Infer", 2025, for DBRX and Scaled-MoE (https://arxiv.org/abs/2504.02263)."""
