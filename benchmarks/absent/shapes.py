"""Shapes of published MoE models at which kernels are compiled, and odd ones."""

from typing import NamedTuple


class Model(NamedTuple):
    """Sizes that decide the kernels of a network.

    Attributes:
      hidden: elements of a token.
      inner: hidden units of an expert.
      experts, k: number of experts, and of those that a token goes to.
      heads, kv_heads: query heads and key/value heads.
      width, wide: elements of a head of queries and keys, and of values.
      window: positions that a query looks back in layers with a window; None without.
      rank: numbers of a latent vector that are its values too, where latent vectors are cached.
      groups, open_groups: groups of experts, and of those that a token may go to.
      tokens: of a device.
    """

    hidden: int
    inner: int
    experts: int
    k: int
    heads: int
    kv_heads: int
    width: int
    wide: int
    window: int | None = None
    rank: int | None = None
    groups: int = 1
    open_groups: int = 1
    tokens: int = 4096


MODELS = {
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8, 32, 4, 128, 128),
    "Qwen3-235B-A22B": Model(4096, 1536, 128, 8, 64, 4, 128, 128),
    "Mixtral-8x22B": Model(6144, 16384, 8, 2, 48, 8, 128, 128),
    "DeepSeek-V3": Model(
        *(7168, 2048, 256, 8, 128, 128, 192, 128), rank=512, groups=8, open_groups=4
    ),
    "gpt-oss-120b": Model(2880, 2880, 128, 4, 64, 8, 64, 64, window=128),
    # Nothing fills whole tiles; wide heads, whose gradients take the most registers.
    "odd": Model(192, 320, 5, 3, 6, 2, 256, 256, window=50, tokens=70),
}
"""The models' own configurations on Hugging Face."""
FIRST = "Qwen3-30B-A3B"
"""The model that a quick check compiles every kernel for."""
QUICK = {
    # Latent vectors, which the first model lacks.
    "DeepSeek-V3": ("latent decode attention",),
    # Heads of 256 elements, which take the most registers.
    "odd": ("attention", "attention gradient", "decode attention"),
}
"""Operations that a quick check compiles for other models too."""
ROPE = 64
"""Elements of a latent vector beside its values, in multi-head latent attention."""
