"""Models of published measurements, by name."""

from dataclasses import replace

from sharding.planner.models.sizes import ModelSizes

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
    "qwen3-235b-a22b": ModelSizes(
        num_layers=94,
        d_model=4096,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        experts_per_token=8,
        d_expert=1536,
    ),
    "dbrx": ModelSizes(
        num_layers=40,
        d_model=6144,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=100352,
        num_experts=16,
        experts_per_token=4,
        d_expert=10752,
    ),
    # The paper gives its name and 317 B parameters; these sizes come to that.
    "scaled-moe": ModelSizes(
        num_layers=48,
        d_model=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        num_experts=32,
        experts_per_token=4,
        d_expert=8192,
    ),
}
"""Liu et al., "MoE Parallel Folding", 2025, section 4 (https://arxiv.org/abs/2504.14960); Jin et
al., "MegaScale-MoE", 2025, table 1 (https://arxiv.org/abs/2505.11432); Qwen3, 2025; Zhu
et al., "MegaScale-Infer", 2025, for DBRX and Scaled-MoE (https://arxiv.org/abs/2504.02263)."""
