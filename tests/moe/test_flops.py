import doctest

import pytest

import moe.flops
from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.flops import training_flops


def sized(layers, d_model, heads, kv_heads, head_dim, d_expert, k, experts, vocab, shared=0):
    return ModelConfig(
        vocab,
        num_layers=layers,
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        experts_per_token=k,
        d_expert=d_expert,
        d_ff=shared,
    )


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # GFLOP per token at 4096 tokens, as Megatron's formula gives them, to the digits stated.
        pytest.param(
            sized(94, 4096, 64, 4, 128, 1536, 8, 128, 151936), 148.03, id="Qwen3-235B-A22B"
        ),
        pytest.param(sized(56, 6144, 48, 8, 128, 16384, 2, 8, 32768), 242.2, id="Mixtral-8x22B"),
        pytest.param(
            sized(28, 3584, 28, 4, 128, 2560, 8, 64, 151936, shared=20480),
            84.7,
            id="Qwen2-57B-A14B",
        ),
    ],
)
def test_published_models(config, billions):
    digits = len(str(billions).split(".")[1])
    assert round(training_flops(config, 4096) / 1e9, digits) == billions


def test_dense_layers_count_their_own_width():
    same = {"num_layers": 5, "d_model": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    experts = {"num_experts": 8, "experts_per_token": 2, "d_expert": 6, "d_ff": 0}
    all_moe = training_flops(ModelConfig(50, **same, **experts), 16)
    two_dense = training_flops(
        ModelConfig(50, **same, **experts, num_dense_layers=2, dense_d_ff=7), 16
    )
    assert two_dense - all_moe == 6 * 3 * 12 * 2 * (7 - 2 * 6)
    dense = training_flops(ModelConfig(50, **same, num_experts=0, d_ff=12), 16)
    assert dense == all_moe


def test_a_critic_has_one_column():
    network = {"num_layers": 1, "d_model": 8, "num_experts": 0, "d_ff": 4}
    policy, critic = (
        training_flops(ModelConfig(50, **network, head=head), 16) for head in ("untied", "value")
    )
    assert policy - critic == 6 * 8 * 49


def test_latent_attention_is_refused():
    mla = MultiHeadLatentAttention(
        kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, v_head_dim=6
    )
    with pytest.raises(ValueError, match="latent"):
        training_flops(ModelConfig(50, mla=mla), 16)


def test_the_example():
    assert doctest.testmod(moe.flops).failed == 0
