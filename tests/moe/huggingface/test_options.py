"""The options of a config.json: what is read, and what is refused by name."""

import json
from dataclasses import replace

import pytest
from annotations import unchecked
from public_checkpoints import FIXTURES, LATER, change_options, copy_of, loaded

from moe import huggingface
from moe.architecture.feed_forward import ClampedSwiGLU
from moe.config import GatedDeltaNet
from moe.weights import targets_of


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("qwen3_moe", "num_local_experts", "four", "num_experts='four' has the wrong type"),
        ("qwen3_moe", "hidden_size", 10**400, "d_model=1000"),
        ("qwen2", "hidden_size", None, "one of its options has the wrong type"),
        ("qwen2", "num_attention_heads", 0, "one of its options has the wrong type"),
        ("qwen3_moe", "vocab_size", 37.0, r"vocab_size=37\.0 has the wrong type"),
        ("qwen3_moe", "norm_topk_prob", 1, "renormalise=1 has the wrong type"),
        ("llama", "rope_parameters", [1], "rope_parameters=.* is not supported"),
        ("llama", "rope_parameters", {"rope_theta": "x"}, "rope_base='x' has the wrong type"),
        ("llama", "rope_parameters", {"rope_type": {}}, "rope_type={} is not supported"),
        ("deepseek_v3", "kv_lora_rank", "3", "mla=MultiHeadLatentAttention"),
    ],
)
@unchecked()
def test_an_option_of_another_type_is_one_line(tmp_path, name, option, value, message):
    options = json.loads((FIXTURES / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**options, option: value}))
    with pytest.raises(ValueError, match=message) as caught:
        huggingface.config_from(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


HARMLESS = {
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_version": "2025.6.2",
    "unsloth_fixed": True,
    "_commit_hash": "0123",
    "_attn_implementation": "sdpa",
    "id2label": {"0": "LABEL_0"},
    "top_k": 50,
    "max_length": 20,
}
"""Options that published files have and that change no logit."""


def changed_checkpoint(folder, changes):
    options = json.loads((FIXTURES / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**options, **changes}))
    return folder


def test_what_changes_no_logit_is_passed_over(tmp_path):
    expected = huggingface.config_from(FIXTURES / "llama")
    folder = changed_checkpoint(tmp_path, HARMLESS)
    assert huggingface.config_from(folder) == expected
    assert huggingface.idle_options(folder) == []


def test_what_is_not_known_and_off_is_passed_over_and_listed(tmp_path):
    expected = huggingface.config_from(FIXTURES / "llama")
    off = {"use_mrope": False, "mup_scales": None, "towers": [], "kind": ""}
    folder = changed_checkpoint(tmp_path, {**off, **HARMLESS})
    assert huggingface.config_from(folder) == expected
    listed = ['kind=""', "mup_scales=null", "towers=[]", "use_mrope=false"]
    assert huggingface.idle_options(folder) == listed


IDLE = {
    "_model_name_or_path": "a/b",
    "_own": 3,
    "boi_token_id": 5,
    "audio_token_index": 6,
    "stop_token_ids": [1],
    "min_p": 0.1,
    "guidance_scale": 2.0,
}


def test_names_of_tokens_and_defaults_of_generation_are_passed_over_and_listed(tmp_path):
    expected = huggingface.config_from(FIXTURES / "llama")
    folder = changed_checkpoint(tmp_path, {**IDLE, "unk_token_id": 0, "sep_token_id": 2})
    assert huggingface.config_from(folder) == expected
    assert [each.partition("=")[0] for each in huggingface.idle_options(folder)] == sorted(IDLE)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts": 3}, "num_experts=3 and num_local_experts=8, which are one"),
        ("llama", {"dtype": "bfloat16", "torch_dtype": "float32"}, "dtype='bfloat16' and torch_d"),
        ("gemma3", {"sliding_window_pattern": 2}, "sliding_window_pattern=2 and _sliding_window_"),
        ("qwen2", {"rope_theta": 3.0}, "rope_theta=3.0 and, in the RoPE parameters, "),
        (
            "gpt_oss",
            {"rope_scaling": {"rope_type": "yarn", "factor": 9.0}},
            "has rope_parameters=.* and rope_scaling=.*, which are one option: keep one of them",
        ),
    ],
)
def test_an_option_with_two_values_is_refused(tmp_path, name, changes, message):
    folder = copy_of(name, tmp_path / "twice")
    change_options(folder, **changes)
    with pytest.raises(ValueError, match=message):
        huggingface.config_from(folder)


def test_what_is_not_known_and_on_is_named_and_can_be_ignored(tmp_path):
    folder = changed_checkpoint(tmp_path, {"use_mrope": True, "mup_scale": 0.0, "towers": []})
    message = (
        r"has options that are not supported: mup_scale=0.0, use_mrope=True. Pass over those that "
        r"have no effect: --ignore-options NAME\.$"
    )
    with pytest.raises(ValueError, match=message):
        huggingface.config_from(folder)
    with pytest.raises(ValueError, match=r"supported: mup_scale=0\.0\."):
        huggingface.config_from(folder, ignore=["use_mrope"])
    expected = huggingface.config_from(FIXTURES / "llama")
    assert huggingface.config_from(folder, ignore=["use_mrope", "mup_scale"]) == expected


def test_a_configuration_nested_too_deeply_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON: maximum recursion"):
        huggingface.config_from(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"model_type": "gpt2"}, r"model_type='gpt2' is not supported.*qwen3_moe"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported"),
        ("llama", {"attention_bias": True}, r"attention_bias=True is not supported"),
        ("llama", {"logit_softcap": 30.0}, r"not supported: logit_softcap=30.0"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config="),
        ("llama", {"rms_norm_eps": ...}, r"lacks the option rms_norm_eps"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            r"rope_type='longrope' is not supported; supported: default, linear, llama3, yarn",
        ),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            r"parameters with original_max_position_embeddings",
        ),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, r"with use_sliding_window=true"),
        (
            "qwen2",
            {"layer_types": ["linear_attention"] * 2},
            r"full_attention or sliding_attention",
        ),
        (
            "qwen3_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 3,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            r"the same window in every layer",
        ),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"dense layers only before all others"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step=2 is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8.0 is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, r"2 x topk_group = 2"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor"),
        ("olmo3", {"attention_bias": True}, r"attention_bias=True is not supported"),
        (
            "olmo3",
            {"layer_types": ["chunked_attention"] * 3},
            r"or sliding_attention for each layer",
        ),
        ("olmo3", {"sliding_window": None}, r"sliding_window=None is not supported"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"no scaling for sliding_attention",
        ),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, r"1 or 0 for each layer"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 3},
            r"_window=true",
        ),
        ("glm4_moe", {"n_group": 2, "topk_group": 1}, r"2 x topk_group = 2"),
        ("gpt_oss", {"swiglu_beta": 1.0}, r"not supported: swiglu_beta=1.0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 is not"),
        ("gemma3", {"hidden_activation": "gelu"}, r"supported: 'silu' or 'gelu_pytorch_tanh'"),
        ("gemma3", {"use_bidirectional_attention": True}, r"use_bidirectional_attention=True"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, r"full_attention or linear_att"),
        ("qwen3_next", {"mlp_only_layers": [0]}, r"Gated DeltaNet do not support num_dense_l"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, r"hidden_act='gelu_pytorch_tanh' is"),
    ],
)
def test_options_that_are_not_supported_are_named(name, changed, message, tmp_path):
    folder = copy_of(name, tmp_path / "changed")
    change_options(folder, **changed)
    with pytest.raises(ValueError, match=message):
        huggingface.config_from(folder)


OLD = {"rope_parameters": ..., "layer_types": ...}


def test_files_of_other_times_say_the_same(tmp_path):
    """As the files on hubs are: without what newer versions write, and with what they dropped."""
    olmo = copy_of("olmo3", tmp_path / "olmo")
    scaling = json.loads((olmo / "config.json").read_text())["rope_parameters"]["full_attention"]
    scaling.pop("rope_theta")
    change_options(olmo, **OLD, rope_theta=50.0, rope_scaling=scaling, sliding_window=...)
    config = huggingface.config_from(olmo)
    assert (config.window_rope_base, config.rope_base) == (50.0, 50.0)
    assert config.rope_scaling == loaded("olmo3")[0].rope_scaling
    # With no list all three layers have windows, as of four the first three do.
    assert (config.sliding_window, config.full_attention_layers) == (4096, ())
    gemma = copy_of("gemma3", tmp_path / "gemma")
    pattern = {"sliding_window_pattern": 2, "_sliding_window_pattern": ...}
    change_options(gemma, **OLD, **pattern, rope_theta=1e6, head_dim=...)
    config = huggingface.config_from(gemma)
    assert (config.rope_base, config.window_rope_base, config.rope_scaling) == (1e6, 1e4, None)
    assert (config.full_attention_layers, config.head_dim, config.head) == ((1,), 256, "tied")
    smol = copy_of("smollm3", tmp_path / "smol")
    change_options(smol, no_rope_layers=..., no_rope_layer_interval=3)
    assert huggingface.config_from(smol).nope_layers == (2,)
    oss = copy_of("gpt_oss", tmp_path / "oss")
    change_options(oss, layer_types=..., experts_per_token=3, initial_context_length=16)
    assert huggingface.config_from(oss).full_attention_layers == (1,)
    following = copy_of("qwen3_next", tmp_path / "following")
    rotary = {"rope_parameters": ..., "rope_theta": 1e7, "rope_scaling": None, "head_dim": ...}
    change_options(following, layer_types=..., num_hidden_layers=5, **rotary)
    config = huggingface.config_from(following)
    assert config.delta == replace(loaded("qwen3_next")[0].delta, layers=(0, 1, 2, 4))
    assert (config.head_dim, config.rotary_dim, config.rope_base) == (256, 64, 1e7)


def test_choices_are_those_of_the_file():
    olmo, smol, glm, oss, gemma, following = (loaded(name)[0] for name in LATER)
    assert following.delta == GatedDeltaNet((0, 2), 2, 4, 6, 5, 4)
    assert following.attention_gate and following.shared_expert_gate
    # Layers without attention have no adapters of it.
    assert targets_of(following) == ("attention", "experts", "shared", "head")
    assert (olmo.norm_placement, olmo.query_key_norm) == ("after", "projection")
    assert (smol.nope_layers, smol.head) == ((1,), "tied")
    assert (glm.rotary_dim, glm.num_dense_layers, glm.router_scores) == (6, 1, "sigmoid")
    assert oss.attention_sinks and oss.expert_bias and oss.router_bias and oss.qkv_bias
    assert oss.activation == ClampedSwiGLU(1.6, 0.9)
    assert targets_of(oss) == ("attention", "experts", "head")
    assert (gemma.activation, gemma.norm_placement) == ("gelu_tanh", "both")
    assert gemma.attention_scale == 10**-0.5
    assert (gemma.rope_base, gemma.window_rope_base) == (50.0, 20.0)


def test_windows_that_a_file_does_not_list_are_those_of_its_architecture(tmp_path):
    asked = {"use_sliding_window": True, "sliding_window": ..., "layer_types": ...}
    for name, last, window, full in (
        ("qwen2", 1, 4096, (0,)),
        ("qwen2", 2, None, ()),
        ("qwen2_moe", 1, 4096, (1, 2)),
        ("qwen3_moe", 1, 4096, ()),
    ):
        folder = copy_of(name, tmp_path / f"{name}{last}")
        change_options(folder, **asked, max_window_layers=last)
        config = huggingface.config_from(folder)
        assert (config.sliding_window, config.full_attention_layers) == (window, full)


def test_options_as_older_files_have_them(tmp_path):
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    folder = copy_of("deepseek_v3", tmp_path / "old")
    change_options(folder, rope_parameters=..., rope_theta=50, rope_scaling=scaling)
    assert huggingface.config_from(folder) == huggingface.config_from(FIXTURES / "deepseek_v3")


def test_routers_come_without_losses_and_biases_that_stay(tmp_path):
    folder = copy_of("deepseek_v3", tmp_path / "trained")
    change_options(folder, router_aux_loss_coef=0.02, aux_loss_alpha=0.001)
    for config in (huggingface.config_from(folder), loaded("qwen3_moe")[0]):
        names = ("load_balance_coef", "router_z_coef", "batch_balance_coef", "global_balance_coef")
        assert [getattr(config, name) for name in names] == [0.0] * 4
        assert config.bias_update_rate == 0.0
    assert huggingface.config_from(folder).selection_bias


def test_another_name_of_an_architecture_is_read_and_not_written():
    """Kimi-K2 is DeepSeek-V3, whose name every version of `transformers` knows."""
    config, _ = loaded("kimi_k2")
    stated = json.loads((FIXTURES / "kimi_k2" / "config.json").read_text())
    assert stated["model_type"] == "kimi_k2"
    assert huggingface.options_from(config)["model_type"] == "deepseek_v3"
    assert (config.num_experts, config.num_expert_groups, config.routed_scaling) == (8, 1, 2.8)
