"""Where the slots of a pool live, and what their cache holds."""

import math
from dataclasses import replace

import pytest
from programs import mesh_of

from jrl.rollout.decoding.slots import Decoder, abstract_pool
from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=4,
    num_kv_heads=4,
    head_dim=9,
    num_experts=0,
    d_ff=12,
    mla=MultiHeadLatentAttention(
        kv_lora_rank=5, q_lora_rank=None, qk_rope_head_dim=4, v_head_dim=3
    ),
)


@pytest.mark.parametrize(
    ("latent", "keys", "values"),
    # Each rank of tp has the narrow vectors of its rows, and of the heads its own.
    [(None, [(6, 2, 9, 7)] * 2, []), ("expanded", [(6, 4, 9, 7)] * 2, [(6, 4, 7, 3)] * 2)],
)
def test_a_pool_holds_narrow_vectors_on_each_rank_of_tp(latent, keys, values):
    mesh = mesh_of("tp2 dp2")
    config = replace(CONFIG, execution=Execution(latent=latent))
    cache = abstract_pool(
        Decoder(config, mesh, pad_id=0, stop_ids=(1,)), slots=6, max_length=7
    ).cache
    assert [x.shape for x in cache.keys] == keys
    assert [x.shape for x in cache.values] == values
    for x in (*cache.keys, *cache.values):
        slots, heads, _, _ = x.sharding.shard_shape(x.shape)
        assert (slots, heads) == (3, x.shape[1] // 2)
        assert math.prod(x.sharding.shard_shape(x.shape)) * 4 == x.size
