"""A checkpoint's config.json states the sizes that the network reads from it."""

import json
from dataclasses import replace

import pytest

from moe.architecture.feed_forward import ClampedSwiGLU
from moe.config import ModelConfig
from moe.counts import sizes_of
from moe.huggingface.configuration import config_from, options_from
from sharding.planner.models import sizes_from

BASE = ModelConfig(
    vocab_size=23,
    num_layers=3,
    d_model=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    num_experts=5,
    experts_per_token=2,
    d_expert=14,
    embedding_scale=1.0,
)


DENSE = replace(BASE, num_experts=0, d_ff=18)
GEMMA = replace(
    DENSE,
    norm_placement="both",
    query_key_norm="head",
    activation="gelu_tanh",
    embedding_scale=None,
    head="tied",
)
GLM = replace(
    BASE,
    router_scores="sigmoid",
    selection_bias=True,
    d_ff=14,
    num_dense_layers=1,
    dense_d_ff=20,
    rotary_dim=2,
)
OSS = replace(
    BASE,
    qkv_bias=True,
    attention_out_bias=True,
    attention_sinks=True,
    router_bias=True,
    expert_bias=True,
    activation=ClampedSwiGLU(1.702, 7.0),
)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MixtralForCausalLM", BASE),
        ("Qwen3MoeForCausalLM", replace(BASE, query_key_norm="head")),
        ("Qwen2MoeForCausalLM", replace(BASE, d_ff=10, qkv_bias=True, shared_expert_gate=True)),
        ("LlamaForCausalLM", replace(BASE, num_experts=0, d_ff=18, head="tied")),
        ("Olmo3ForCausalLM", replace(DENSE, norm_placement="after", query_key_norm="projection")),
        ("Gemma3ForCausalLM", replace(GEMMA, head="untied")),
        ("Glm4MoeForCausalLM", GLM),
        ("GptOssForCausalLM", OSS),
    ],
)
def test_sizes_are_those_of_the_network(architecture, config, tmp_path):
    if architecture.startswith("Qwen2"):
        config = replace(config, head_dim=2)
    options = options_from(config, architecture)
    (tmp_path / "config.json").write_text(json.dumps(options))
    assert sizes_from(tmp_path) == sizes_of(config_from(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("SmolLM3ForCausalLM", replace(DENSE, head="tied", nope_layers=(1,))),
        ("Gemma3ForCausalLM", GEMMA),
    ],
)
def test_a_head_that_is_not_spoken_of_is_that_of_the_architecture(architecture, config, tmp_path):
    options = options_from(config, architecture)
    assert options.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(options))
    assert sizes_from(tmp_path).tied
    assert sizes_from(tmp_path) == sizes_of(config_from(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank=512 is latent attention"),
        ({"hidden_size": 3}, "lacks num_hidden_layers, num_attention_heads, vocab_size"),
    ],
)
def test_what_cannot_be_described_is_refused(options, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=words):
        sizes_from(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config.json is not JSON"),
        ("[" * 100_000, "config.json is not JSON"),
        ("[1]", "config.json holds a list, not a model config"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        sizes_from(tmp_path)
