"""Small random checkpoints of every supported architecture, and what `transformers` makes of them.

    python tests/moe/huggingface/make_fixtures.py [NAME...]  writes fixtures anew
    python tests/moe/huggingface/make_fixtures.py --check    what we export loads in `transformers`

Needs torch, transformers and this repository on the path. Each folder holds a checkpoint as
`transformers` saves it and golden.npz: tokens, which of them are valid, float32 logits and, of
newer architectures with experts, the experts that each token chose in each layer.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
BATCH, TIME = 4, 11

SIZES = {
    "vocab_size": 37,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Where heads have no width of their own it is hidden_size / num_attention_heads, and even.
NARROW = {**SIZES, "hidden_size": 24}
# Short contexts and wavelengths, so that a few tokens lie on both sides of every border.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("Llama", {**SIZES, "head_dim": 12, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**SIZES, "head_dim": 6, "sliding_window": 5}),
    "qwen2": ("Qwen2", {**NARROW, "rope_parameters": YARN}),
    "qwen3": (
        "Qwen3",
        {
            **SIZES,
            "head_dim": 6,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            **SIZES,
            "head_dim": 6,
            "intermediate_size": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **NARROW,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 14,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SIZES,
            "head_dim": 6,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {**NARROW, "intermediate_size": 10, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 9,
            "kv_lora_rank": 11,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 5,
            "v_head_dim": 7,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    # Queries straight from the stream, as in the small models of the family.
    "deepseek_v3_direct": (
        "DeepseekV3",
        {
            **SIZES,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "kv_lora_rank": 11,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 7,
            "norm_topk_prob": False,
        },
    ),
}
MODELS["olmo3"] = (
    "Olmo3",
    {
        **SIZES,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**YARN, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
)
MODELS["smollm3"] = (
    "SmolLM3",
    {
        **NARROW,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "rope_parameters": {**YARN, "attention_factor": 1.3},
    },
)
MODELS["glm4_moe"] = (
    "Glm4Moe",
    {
        **SIZES,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    },
)
MODELS["gpt_oss"] = (
    "GptOss",
    {
        **SIZES,
        "head_dim": 6,
        "num_key_value_heads": 2,
        "sliding_window": 3,
        "intermediate_size": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.6,
        # Of scores as here, some are cut.
        "swiglu_limit": 0.9,
        "rope_parameters": {**YARN, "truncate": False},
    },
)
MODELS["gemma3"] = (
    "Gemma3",
    {
        **SIZES,
        "num_hidden_layers": 3,
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
)
# Of three layers with Gated DeltaNet one before and one after that with attention.
MODELS["qwen3_next"] = (
    "Qwen3Next",
    {
        **SIZES,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
        },
    },
)
# As Kimi-K2 comes: the network of DeepSeek-V3 under another name, of one group, its wavelengths
# stretched from one border on.
MODELS["kimi_k2"] = (
    "DeepseekV3",
    {
        **SIZES,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 9,
        "kv_lora_rank": 11,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 5,
        "v_head_dim": 7,
        "routed_scaling_factor": 2.8,
        "rope_parameters": {
            **YARN,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
CALLED = {"kimi_k2": "kimi_k2"}
"""Model types that are not those `transformers` writes."""
WITH_CHOICES = ("glm4_moe", "gpt_oss", "qwen3_next")
IN_BFLOAT16 = ("mistral",)
IN_TWO_FILES = ("mixtral", "deepseek_v3")


def randomise(model, seed):
    """Weights as large as trained ones, norms and biases included, so that each one matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if "inv_freq" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        centred = ("Gemma", "Qwen3Next")
        if (
            "norm" in name
            and "linear_attn" not in name
            and type(model).__name__.startswith(centred)
        ):
            # They multiply by 1 + w, which is to have no more digits than float32.
            tensor.data = (0.3 * noise * 4096).round() / 4096
        elif "norm" in name:
            tensor.data = 1 + 0.3 * noise
        elif tensor.ndim == 1:
            tensor.data = 0.2 * noise
        else:
            tensor.data = noise * (1.0 if "embed" in name else tensor.shape[-1] ** -0.5)


def batch():
    """Rows of all lengths, padded on the left."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, SIZES["vocab_size"], (BATCH, TIME)).astype(np.int32)
    valid = np.arange(TIME)[None, :] >= np.array([0, 4, 0, 7])[:, None]
    return np.where(valid, tokens, 0), valid


def logits_of(model, tokens, valid):
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(tokens.astype(np.int64)),
            attention_mask=torch.tensor(valid.astype(np.int64)),
            position_ids=torch.tensor(positions),
        )
    return np.where(valid[..., None], out.logits.float().numpy(), 0.0)


def choices_of(model, tokens, valid):
    """The experts of each token in ascending order, ``[layer, batch, time, k]``."""
    found = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: found.append(out[2].numpy()))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    logits_of(model, tokens, valid)
    for hook in hooks:
        hook.remove()
    return np.sort(np.stack(found).reshape(len(found), *tokens.shape, -1), axis=-1)


def read(folder):
    """The model of a checkpoint in float32, and what did not fit."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval(), {key: found for key, found in report.items() if found}


def make(name):
    kind, options = MODELS[name]
    known = (f"{kind}TextConfig", f"{kind}Config")
    name_of_config = next(one for one in known if hasattr(transformers, one))
    config = getattr(transformers, name_of_config)(**options)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    randomise(model, seed=len(name))
    if name in IN_BFLOAT16:
        model = model.to(torch.bfloat16)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size * 2 // 3 if name in IN_TWO_FILES else size)
    (folder / "generation_config.json").unlink()
    tokens, valid = batch()
    model = read(folder)[0]
    golden = {"tokens": tokens, "valid": valid, "logits": logits_of(model, tokens, valid)}
    if name in WITH_CHOICES:
        golden["choices"] = choices_of(model, tokens, valid).astype(np.int8)
    np.savez_compressed(folder / "golden.npz", **golden)
    if name in CALLED:
        options = json.loads((folder / "config.json").read_text()) | {"model_type": CALLED[name]}
        (folder / "config.json").write_text(json.dumps(options, indent=2) + "\n")
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")


def check(name):
    """Import, export, and the logits of `transformers` on what was exported."""
    from moe import huggingface
    from sharding import Layout, fold

    golden = np.load(HERE / name / "golden.npz")
    with tempfile.TemporaryDirectory() as exported:
        config, weights = huggingface.load(HERE / name, fold(Layout()))
        about = {"max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 0}
        huggingface.save(exported, config, weights, file_bytes=30_000, about=about)
        model, wrong = read(exported)
    logits = logits_of(model, golden["tokens"], golden["valid"])
    difference = np.abs(logits - golden["logits"]).max()
    print(
        f"{name}: as {type(model).__name__}, largest difference {difference:.1e}, {wrong or 'ok'}"
    )
    return difference < 1e-5 and not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="fixtures; all by default")
    arguments = parser.parse_args()
    names = arguments.names or list(MODELS)
    if arguments.check:
        sys.exit(0 if all([check(name) for name in names]) else 1)
    for name in names:
        make(name)


if __name__ == "__main__":
    main()
