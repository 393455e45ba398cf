import doctest
from dataclasses import replace

import numpy as np
import pytest

import moe.config
from moe.config import GatedDeltaNet, ModelConfig, MultiHeadLatentAttention, training_flops
from moe.planner.models import sizes_of
from moe.weights import num_active_parameters, num_parameters


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


def test_gated_delta_net_stands_in_the_place_of_attention():
    config, time = sized(3, 20, 2, 1, 10, 7, 2, 4, 11), 400
    delta = GatedDeltaNet((0, 2), 3, 6, key_head_dim=4, value_head_dim=5, conv_width=4)
    attention = 6 * (20 * (2 * 20 + 2 * 10) + 20 * time)
    # Queries, keys, values, gates, the way back; strengths and decays; three products of a state.
    linear = 6 * (20 * (2 * 12 + 3 * 30 + 2 * 6) + 6 * 3 * 4 * 5)
    found = training_flops(replace(config, delta=delta), time) - training_flops(config, time)
    assert found == 2 * (linear - attention)
    gated = training_flops(replace(config, delta=delta, attention_gate=True), time)
    assert gated - training_flops(replace(config, delta=delta), time) == 6 * 20 * 20
    windows = replace(config, delta=delta, sliding_window=30, full_attention_layers=(1,))
    assert training_flops(windows, time) == training_flops(replace(config, delta=delta), time)
    with pytest.raises(ValueError, match="does not support Gated DeltaNet"):
        sizes_of(replace(config, delta=delta))


def test_qwen3_next_has_the_sizes_of_its_name():
    config = replace(
        sized(48, 2048, 16, 2, 256, 512, 10, 512, 151936, shared=512),
        delta=GatedDeltaNet(tuple(n for n in range(48) if n % 4 < 3), 16, 32, 128, 128, 4),
        attention_gate=True,
        query_key_norm="head",
        shared_expert_gate=True,
    )
    assert round(num_parameters(config) / 1e9) == 80
    assert 3e9 < num_active_parameters(config) - 2 * 151936 * 2048 < 3.5e9


def test_the_example():
    assert doctest.testmod(moe.config).failed == 0


def test_counted_scores_exclude_tokens_before_window():
    """Against the keys that each query sees, counted; the formula takes T + 1 for T."""
    config, time = sized(3, 20, 2, 1, 10, 7, 2, 4, 11), 400

    def attention(window, full=()):
        own = replace(config, sliding_window=window, full_attention_layers=full)
        weights = training_flops(config, 1) - 6 * 3 * 2 * 10
        return (training_flops(own, time) - weights) / (12 * 2 * 10)

    def seen(window):
        return sum(min(place + 1, window) for place in range(time)) / time

    assert attention(None) == attention(time) == attention(1000) == 3 * time / 2
    np.testing.assert_allclose(attention(30), 3 * seen(30), rtol=0.02)
    np.testing.assert_allclose(attention(30, (1,)), 2 * seen(30) + seen(time), rtol=0.02)
