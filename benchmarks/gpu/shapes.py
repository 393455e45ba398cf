"""Published shapes that are measured, and small ones for a CPU."""

from typing import Any, NamedTuple

from moe.architecture.attention import MultiHeadLatentAttention


class Product(NamedTuple):
    """Rows times the matrix of their group: ``[rows, inner] x [groups, inner, outer]``."""

    rows: int
    inner: int
    outer: int
    groups: int


class Dispatch(NamedTuple):
    """Tokens that choose experts."""

    tokens: int
    k: int
    experts: int
    width: int


class Cached(NamedTuple):
    """Rows of a cache that a decoding step reads.

    Attributes:
      rank: how many of the numbers of a column are its values too, in a cache of narrow vectors;
        None is one of keys and values.
    """

    rows: int
    columns: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int | None = None


PRODUCTS = {
    "deepseek-v3": Product(131072, 7168, 1024, 256),
    "mixtral": Product(8192, 4096, 14336, 8),
    "qwen3-30b-a3b": Product(262144, 2048, 768, 128),
}
SMALL_PRODUCTS = {"small": Product(96, 64, 128, 3)}

DISPATCHES = {
    "qwen3-30b-a3b": Dispatch(32768, 8, 128, 2048),
    "deepseek-v3": Dispatch(8192, 8, 256, 7168),
}
SMALL_DISPATCHES = {"small": Dispatch(48, 2, 8, 128)}

CACHES = {
    "qwen3-0.6b": Cached(256, 1152, 16, 8, 128),
    "qwen3-30b-a3b": Cached(64, 4160, 32, 4, 128),
    "deepseek-v3": Cached(64, 4160, 128, 1, 576, rank=512),
}
"""Of prompts of 128 tokens and responses of 1,000 and of 4,000."""
SMALL_CACHES = {
    "small": Cached(2, 128, 4, 2, 64),
    "small, latent": Cached(2, 128, 4, 1, 192, rank=128),
}

SMALL_MOE: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "d_expert": 8,
}
SMALL_DENSE = SMALL_MOE | {"num_experts": 0, "d_ff": 24}

LLAMA_3B: dict[str, Any] = {
    "vocab_size": 128256,
    "num_layers": 28,
    "d_model": 3072,
    "num_heads": 24,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_experts": 0,
    "d_ff": 8192,
    "head": "tied",
    "rope_base": 500000.0,
}
"""Llama-3.2-3B: 3.2 billion parameters."""
MOE_4B: dict[str, Any] = {
    "vocab_size": 32768,
    "num_layers": 12,
    "d_model": 2048,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "experts_per_token": 4,
    "d_expert": 1408,
    "router_z_coef": 0.0,
}
"""3.6 billion parameters, of which a token meets 0.7: what one device of 80 GB trains."""
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "num_layers": 28,
    "d_model": 1024,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_experts": 0,
    "d_ff": 3072,
    "head": "tied",
    "query_key_norm": "head",
    "rope_base": 1000000.0,
}
"""Qwen3-0.6B."""
QWEN3_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "num_layers": 48,
    "d_model": 2048,
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "experts_per_token": 8,
    "d_expert": 768,
    "query_key_norm": "head",
    "rope_base": 1000000.0,
}
"""Qwen3-30B-A3B: a token meets 3.3 billion of its parameters."""
QWEN3_235B = QWEN3_A3B | {"num_layers": 94, "d_model": 4096, "num_heads": 64, "d_expert": 1536}
"""Qwen3-235B-A22B: a token meets 22 billion of its parameters."""
QWEN3_A3B_OF_32 = QWEN3_A3B | {"num_experts": 32}
"""The same with 32 of the experts: those of 128 and a cache of 256 rows are larger than 80 GB."""
MIXTRAL_8X22B: dict[str, Any] = {
    "vocab_size": 32768,
    "num_layers": 56,
    "d_model": 6144,
    "num_heads": 48,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_experts": 8,
    "experts_per_token": 2,
    "d_expert": 16384,
    "rope_base": 1000000.0,
}
"""Mixtral-8x22B: a token meets 39 billion of its 141 billion parameters."""
DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "num_layers": 61,
    "d_model": 7168,
    "num_heads": 128,
    "num_kv_heads": 128,
    "head_dim": 192,
    "mla": MultiHeadLatentAttention(512, 1536, 64, 128),
    "num_experts": 256,
    "experts_per_token": 8,
    "d_expert": 2048,
    "d_ff": 2048,
    "num_dense_layers": 3,
    "dense_d_ff": 18432,
    "router_scores": "sigmoid",
    "selection_bias": True,
    "num_expert_groups": 8,
    "expert_groups_per_token": 4,
    "routed_scaling": 2.5,
    "rope_interleaved": True,
}
"""DeepSeek-V3, without the scaling of its positions: a token meets 37 billion of its 671 billion
parameters."""
