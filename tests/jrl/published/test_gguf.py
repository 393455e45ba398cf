"""A GGUF file becomes the checkpoint that it was made of."""

import json
import struct

import chex
import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from programs import random_weights
from safetensors.numpy import load_file

from jrl.published.gguf import convert
from jrl.published.gguf_options import LLAMA3_FACTORS, llama3_divisors
from moe import huggingface

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
KINDS = {
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {"sliding_window": 16}, {"attention.sliding_window": 16}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3moe": (
        "qwen3_moe",
        MIXTURE,
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
            "tie_word_embeddings": True,
        },
        {"attention.sliding_window": 16},
    ),
}


def make_checkpoint(folder, kind):
    model_type, options, _ = KINDS[kind]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **options, "model_type": model_type}))
    config = huggingface.config_from(folder)
    (folder / "config.json").unlink()
    huggingface.save(folder, config, random_weights(config, 0))
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_from_gguf(tmp_path, kind):
    config = make_checkpoint(tmp_path / "before", kind)
    # Mistral has Llama's architecture in GGUF.
    architecture = "llama" if kind == "mistral" else kind
    write_gguf(tmp_path / "model.gguf", architecture, tmp_path / "before", KINDS[kind][2])
    convert(tmp_path / "model.gguf", tmp_path / "after")
    assert huggingface.config_from(tmp_path / "after") == config
    before = load_file(tmp_path / "before" / "model.safetensors")
    after = load_file(tmp_path / "after" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        # Gemma's norms have one added in GGUF, and lose the last digit of a float32 there.
        bound = 2**-23 if kind == "gemma3" and "norm" in name else 0.0
        np.testing.assert_allclose(after[name], before[name], rtol=0, atol=2 * bound)


@pytest.mark.parametrize("quantised", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_matrices_have_the_values_that_gguf_gives_them(tmp_path, quantised):
    make_checkpoint(tmp_path / "before", "qwen3")
    kind = gguf.GGMLQuantizationType[quantised]
    path = tmp_path / "model.gguf"
    tensors = write_gguf(path, "qwen3", tmp_path / "before", quantised=kind)
    convert(path, tmp_path / "after")
    after = load_file(tmp_path / "after" / "model.safetensors")
    name = "blk.1.ffn_up.weight"
    expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
    np.testing.assert_array_equal(
        after["model.layers.1.mlp.up_proj.weight"].astype(np.float32), expected
    )
    half = quantised in ("F16", "BF16")
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if half else "float32")
    assert (after["model.layers.1.mlp.up_proj.weight"].dtype.itemsize == 2) == half


def test_large_files_are_written_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.published.gguf.FILE_BYTES", 5000)
    make_checkpoint(tmp_path / "before", "llama")
    write_gguf(tmp_path / "model.gguf", "llama", tmp_path / "before")
    convert(tmp_path / "model.gguf", tmp_path / "after")
    index = json.loads((tmp_path / "after" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    stored = {k: v for file in files for k, v in load_file(tmp_path / "after" / file).items()}
    before = load_file(tmp_path / "before" / "model.safetensors")
    assert stored.keys() == index["weight_map"].keys()
    chex.assert_trees_all_equal(stored, before)


@pytest.mark.parametrize("factor", LLAMA3_FACTORS)
def test_the_scaling_of_llama3_is_recognised_by_its_divisors(tmp_path, factor):
    folder = tmp_path / "before"
    make_checkpoint(folder, "llama")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = tmp_path / "model.gguf"
    divisors = llama3_divisors(scaling, 10_000.0, 8).astype(np.float32)
    write_gguf(path, "llama", folder, more={"rope_freqs.weight": divisors})
    convert(path, tmp_path / "after")
    written = json.loads((tmp_path / "after" / "config.json").read_text())
    assert written["rope_scaling"] == scaling
    write_gguf(path, "llama", folder, more={"rope_freqs.weight": 3 * divisors})
    with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight is the RoPE scaling of"):
        convert(path, tmp_path / "refused")


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("mamba", {}, "general.architecture='mamba' is not supported; supported: llama, qwen2"),
        ("llama", {"expert_count": 8}, "llama.expert_count=8 is not supported"),
        ("qwen3", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, kind, metadata, message):
    make_checkpoint(tmp_path / "before", "qwen3")
    write_gguf(tmp_path / "model.gguf", kind, tmp_path / "before", metadata)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "after")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "model.gguf"]


def test_a_tensor_too_many_or_too_few_is_named(tmp_path):
    make_checkpoint(tmp_path / "before", "qwen3")
    path = tmp_path / "model.gguf"
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(path, "qwen3", tmp_path / "before", more=extra)
    with pytest.raises(ValueError, match=r"tensors that are not supported: blk.0.attn_sinks"):
        convert(path, tmp_path / "after")
    write_gguf(path, "qwen2", tmp_path / "before")
    with pytest.raises(ValueError, match=r"lacks the tensor blk.0.attn_q.bias of model.layers.0"):
        convert(path, tmp_path / "after")


def test_damaged_files_are_refused_in_a_line(tmp_path):
    make_checkpoint(tmp_path / "before", "qwen3")
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", tmp_path / "before")
    whole = path.read_bytes()
    damages = {
        b"": "is empty",
        b"PK" + whole[2:]: r"begins with b'PKUF', not with b'GGUF'",
        whole[:4] + struct.pack("<I", 1) + whole[8:]: "is GGUF of version 1; supported: 2, 3",
        whole[:200]: "ends early, or its header is damaged",
        whole[:-2000]: r"ends within the tensor",
        whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_v.weight"): (
            r"has the tensor blk\.0\.attn_v\.weight 2 times: convert the model again"
        ),
        whole.replace(b"qwen3.rope.freq_base", b"qwen3.context_length"): (
            r"has the entry qwen3\.context_length 2 times"
        ),
    }
    for content, message in damages.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as refusal:
            convert(path, tmp_path / "after")
        assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_beside_embeddings_is_read_as_a_head(tmp_path, is_equal):
    """The file has no option that ties them: its head counts."""
    make_checkpoint(tmp_path / "before", "qwen3")
    embedding = load_file(tmp_path / "before" / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding if is_equal else embedding[::-1].copy()
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", tmp_path / "before", more={"output.weight": head})
    convert(path, tmp_path / "after")
    assert huggingface.config_from(tmp_path / "after").head == "untied"
    written = load_file(tmp_path / "after" / "model.safetensors")
    np.testing.assert_array_equal(written["lm_head.weight"], head)
