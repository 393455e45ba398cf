"""The small network with experts that tests run on many layouts, and batches for it."""

from dataclasses import replace

import numpy as np

from moe.config import ModelConfig

ROUTED = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=8,
    experts_per_token=3,
    d_expert=14,
)
"""A distinct size for each axis, divisible where the tests' layouts cut it."""

DENSE_FIRST = replace(ROUTED, num_dense_layers=1, dense_d_ff=12)
"""The first of its layers has no experts."""


def ragged_rows(config, rows, time):
    """Tokens, and which of them are some: rows of any lengths that end in the last column."""
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (rows, time))
    length = np.arange(rows) % (time - 1) + 2
    return tokens.astype(np.int32), np.arange(time)[None] >= time - length[:, None]


def any_choices(config, rows, time):
    """``[row, time, layer, k]`` any experts, a token's all different, for layers that have them."""
    shape = rows, time, config.num_expert_layers, config.num_experts
    chosen = np.argsort(np.random.default_rng(2).random(shape), axis=-1)
    return chosen[..., : config.experts_per_token].astype(np.uint8)
