"""Every name of a GGUF file's metadata is read, passed over or rejected."""

import json
import mmap

import pytest
from gguf_files import write_gguf
from test_gguf import KINDS, make_checkpoint

from jrl.published.gguf import convert
from jrl.published.gguf_file import GgufFile, StoredTensor
from jrl.published.gguf_options import config_options
from jrl.published.network import open_checkpoint
from moe.huggingface import config_from

SIZES = {
    "context_length": 32768,
    "embedding_length": 32,
    "block_count": 3,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NO_CONTENT = mmap.mmap(-1, 1)


def options_of(kind, metadata=None, general=None):
    stated = {**SIZES, **KINDS[kind][2], **(metadata or {})}
    named = {f"{kind}.{name}": v for name, v in stated.items() if v is not None}
    tensors = {"token_embd.weight": StoredTensor("token_embd.weight", (40, 32), 0, 0)}
    named |= {"general.architecture": kind, **(general or {})}
    return config_options(GgufFile(named, tensors, NO_CONTENT), "model.gguf")


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 8192,
}


@pytest.mark.parametrize(
    ("kind", "metadata", "expected"),
    [
        ("llama", {"rope.dimension_count": 8}, {"head_dim": 8}),
        ("llama", {"attention.key_length": 16, "attention.value_length": 16}, {"head_dim": 16}),
        ("llama", {"attention.head_count": [4, 4, 4]}, {"num_attention_heads": 4}),
        (
            "llama",
            {"attention.sliding_window": 4096},
            {"model_type": "mistral", "sliding_window": 4096},
        ),
        ("llama", {"attention.scale": 8**-0.5}, {"model_type": "llama"}),
        # llama.cpp's default is linear.
        ("qwen2", {"rope.scaling.factor": 4.0}, {"rope_scaling.rope_type": "linear"}),
        ("qwen2", {"rope.scale_linear": 2.0}, {"rope_scaling.factor": 2.0}),
        (
            "qwen3",
            {**YARN, "rope.scaling.yarn_attn_factor": 1.25, "rope.scaling.yarn_beta_fast": 16.0},
            {"rope_scaling.attention_factor": 1.25, "rope_scaling.beta_fast": 16.0},
        ),
        ("qwen3moe", {"expert_weights_norm": False}, {"norm_topk_prob": False}),
        ("gemma3", {"attention.scale": 0.125}, {"query_pre_attn_scalar": 64}),
        ("gemma3", {"block_count": 62, "embedding_length": 64}, {"query_pre_attn_scalar": 16}),
        ("gemma3", {"attention.sliding_window_pattern": 3}, {"sliding_window_pattern": 3}),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False, True]},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        ("gemma3", {"rope.freq_base_swa": 20_000.0}, {"rope_local_base_freq": 20_000.0}),
    ],
)
def test_what_changes_the_network_is_in_its_config(kind, metadata, expected, tmp_path):
    options = options_of(kind, metadata)
    for name, value in expected.items():
        outer, _, inner = name.partition(".")
        assert (options[outer][inner] if inner else options[outer]) == value
    # And the reader of config.json has nothing against it.
    (tmp_path / "config.json").write_text(json.dumps(options))
    config_from(tmp_path)


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping=50.0 is not supported; sup"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping=30.0 is not supported"),
        ("llama", {"attention.scale": 0.015625}, r"llama.attention.scale=0.015625 .*: 0.3535"),
        ("llama", {"rope.dimension_count": 4, "attention.key_length": 8}, "count=4 .*: 8"),
        ("llama", {"attention.value_length": 16}, "value_length=16 is not supported; sup.*: 8"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, r"attn_factor=1.2 is not supported"),
        ("llama", {"residual_scale": 0.22}, r"residual_scale=0.22 is not supported"),
        ("llama", {"logit_scale": 0.0625}, r"logit_scale=0.0625 is not supported"),
        ("llama", {"attention.causal": False}, r"causal=False is not supported; supported: True"),
        ("llama", {"attention.head_count": [4, 2, 4]}, "the same value for each layer"),
        ("llama", {"expert_used_count": 2}, "llama.expert_used_count=2 is not supported"),
        (
            "llama",
            {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2},
            "pattern=2 is not supported; supported: 1",
        ),
        ("qwen2", {"attention.sliding_window": 4096}, "sliding_window=4096 .*: 0, for none"),
        ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func=2 is not supported"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale=2.5 is not supported"),
        ("qwen3moe", {"expert_shared_count": 1}, "expert_shared_count=1 is not supported"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "one per layer"),
        ("gemma3", {"attention.sliding_window": None}, "lacks the option gemma3.attention.slid"),
        ("qwen3", {k: v for k, v in YARN.items() if "original" not in k}, "lacks the option"),
        ("qwen3", {"rope.dimension_sections": [1, 2]}, r"options.*rope.dimension_sections=\[1, 2"),
        ("llama", {"attention.novelty": 3}, "attention.novelty=3. Pass over .*--ignore-options"),
    ],
)
def test_what_is_not_supported_is_one_line(kind, metadata, message):
    with pytest.raises(ValueError, match=message) as refusal:
        options_of(kind, metadata)
    assert str(refusal.value).startswith("model.gguf") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {"vocab_size": 40, "rope.scaling.finetuned": True, "pooling_type": 3},
        {"attn_logit_softcapping": 0.0, "logit_scale": 1.0, "expert_gating_func": 1},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0},
        {"attention.sliding_window": 32768, "expert_count": 0},
        {"rope.scaling.attn_factor": 1.0, "rope.scaling.type": "none"},
    ],
)
def test_what_has_no_effect_is_passed_over(metadata):
    passed = {"quantize.imatrix.file": "x", "general.author": "y", "clip.has_text_encoder": True}
    assert options_of("llama", metadata, passed) == options_of("llama")


def test_a_file_that_is_no_model_or_a_part_of_one_says_so():
    with pytest.raises(ValueError, match=r"general\.type='adapter' is not supported"):
        options_of("llama", general={"general.type": "adapter"})
    with pytest.raises(ValueError, match="is one of 3 parts of a model: join them first"):
        options_of("llama", general={"split.count": 3})


def test_metadata_that_are_ignored_must_be_named_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_checkpoint(tmp_path / "before", "qwen3")
    path, unknown = tmp_path / "model.gguf", {"attention.novelty": 3, "is_new": False}
    write_gguf(path, "qwen3", tmp_path / "before", unknown)
    with pytest.raises(ValueError, match=r"model.gguf has .*: qwen3.attention.novelty=3\. Pass"):
        convert(path, tmp_path / "after")
    assert not (tmp_path / "after").exists()
    names = ["qwen3.attention.novelty"]
    _, config = open_checkpoint(str(path), names)
    assert config == config_from(tmp_path / "before")
    assert "config.json: qwen3.is_new=false, qwen3.attention.novelty" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"config.json has .*: qwen3.attention.novelty=3\. Pass"):
        open_checkpoint(str(path))
    open_checkpoint(str(path), [*names, "qwen3.block_count"])
    for name, hint in (("qwen3.attention.novel", "near: qwen3.attention.novelty"), ("x", "leave")):
        with pytest.raises(ValueError, match=f"ignore_options='{name}' is no option of .*: {hint}"):
            open_checkpoint(str(path), [*names, name])
    with pytest.raises(ValueError, match="ignore_options='use_mrope' is no option of"):
        open_checkpoint(str(tmp_path / "before"), ["use_mrope"])
