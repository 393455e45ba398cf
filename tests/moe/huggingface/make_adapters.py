"""Small random adapters as PEFT writes them beside the checkpoints here, and the logits it gives.

    python tests/moe/huggingface/make_adapters.py [NAME...]  writes them anew
    python tests/moe/huggingface/make_adapters.py --check    PEFT reads what we export

Needs torch, transformers, peft and this repository on the path. Each folder ``adapters/NAME`` holds
PEFT's two files and golden.npz: float32 logits of the tokens in the checkpoint's own golden.npz.
``adapters_of_kinds/NAME`` has the same of adapters with other options, as PEFT gives them when it
has read what it wrote, and those options of which PEFT's own logits show that they change nothing.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
from make_fixtures import HERE, logits_of, read

from moe.config import Model

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
DENSE = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
SHARED = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LATENT = [
    f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
]
# As modules PEFT would take them for experts.
DENSE_WEIGHTS = [f"{name}.weight" for name in DENSE]
SHARED_WEIGHTS = [f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
ADAPTERS = {
    "qwen2": {"target_modules": [*ATTENTION, *DENSE, "lm_head"], "use_rslora": True},
    "qwen3_moe": {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    "gpt_oss": {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    "qwen2_moe": {
        "target_modules": ["self_attn.q_proj", *DENSE, *SHARED],
        "target_parameters": EXPERTS,
    },
    "deepseek_v3": {
        "target_modules": [*LATENT, "self_attn.o_proj"],
        "target_parameters": [*EXPERTS, *DENSE_WEIGHTS, *SHARED_WEIGHTS],
    },
    "glm4_moe": {
        "target_modules": ATTENTION,
        "target_parameters": [*EXPERTS, *DENSE_WEIGHTS, *SHARED_WEIGHTS],
    },
    "qwen3_next": {
        "target_modules": ATTENTION,
        "target_parameters": [*EXPERTS, *(f"{name}.weight" for name in SHARED)],
    },
}
"""Of qwen2_moe attention has an adapter of its queries alone."""

SOME = {"target_modules": [*ATTENTION[:2], "mlp.down_proj", "lm_head"]}
PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"model\.layers\.1\.mlp\.down_proj": 6, "lm_head": 4},
    "alpha_pattern": {"k_proj": 11, r".*\.1\.self_attn\.q_proj": 2, "head": 100, "lm_head": 7},
}
KINDS = {
    "patterns": ("qwen2", {**SOME, **PATTERNS}),
    "patterns_rslora": ("qwen2", {**SOME, **PATTERNS, "use_rslora": True}),
    "narrow_patterns": ("qwen2", {**SOME, "rank_pattern": {"lm_head": 1}}),
    "layers": ("qwen2", {**SOME, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "excluded": ("qwen2", {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "expert_patterns": (
        "qwen3_moe",
        {
            "target_modules": ATTENTION[:1],
            "target_parameters": EXPERTS,
            "rank_pattern": {"mlp.experts.gate_up_proj": 2, "q_proj": 4},
            "alpha_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 9},
        },
    ),
    # PEFT makes parameters of them, of twice the rank for gate and up, and writes patterns.
    "experts_by_old_names": (
        "qwen3_moe",
        {"target_modules": [*ATTENTION[2:], "gate_proj", "up_proj", "down_proj"]},
    ),
}
"""The checkpoint and the options of each kind."""
STARTS = (True, False, "gaussian", "orthogonal", "mica", "eva")
CHANGING_STARTS = ("pissa", "olora")


def make(name):
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **ADAPTERS[name])
    written(name, config, HERE / "adapters" / name, reread=False)


def make_kind(kind):
    name, options = KINDS[kind]
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options)
    written(name, config, HERE / "adapters_of_kinds" / kind, reread=True)


def make_starts():
    """Distance of logits from a plain LoRA's of the same tensors, by how it began."""
    config = peft.LoraConfig(r=4, lora_alpha=5, task_type="CAUSAL_LM", **SOME)
    folder, far = HERE / "adapters_of_kinds" / "starts", {}
    plain = written("qwen2", config, folder, reread=True)
    path = folder / "adapter_config.json"
    options = json.loads(path.read_text())
    golden = np.load(HERE / "qwen2" / "golden.npz")
    for start in (*STARTS, *CHANGING_STARTS):
        path.write_text(json.dumps(options | {"init_lora_weights": start}))
        model = peft.PeftModel.from_pretrained(read(HERE / "qwen2")[0], folder).eval()
        logits = logits_of(model, golden["tokens"], golden["valid"])
        far[str(start).lower()] = float(np.abs(logits - plain).max())
    path.write_text(json.dumps(options, indent=2) + "\n")
    (folder / "far.json").write_text(json.dumps(far, indent=2) + "\n")
    print(far)


def written(name, config, folder, reread):
    """Writes random adapters and their logits."""
    model = peft.get_peft_model(read(HERE / name)[0], config)
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = 0.5 * noise * parameter.shape[-1] ** -0.5
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    text = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(text.replace(str(HERE / name), name))
    golden = np.load(HERE / name / "golden.npz")
    if reread:
        model = peft.PeftModel.from_pretrained(read(HERE / name)[0], folder)
    logits = logits_of(model.eval(), golden["tokens"], golden["valid"])
    np.savez_compressed(folder / "golden.npz", logits=logits)
    print(f"{folder.name}: {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")
    return logits


def check(name, folder):
    """Import, export, and the logits of PEFT with what was exported."""
    from dataclasses import replace

    from moe import huggingface
    from sharding import Layout, fold

    golden, mesh = np.load(HERE / name / "golden.npz"), fold(Layout())
    config = huggingface.config_from(HERE / name)
    config = replace(config, lora=huggingface.adapters_of(folder, config))
    adapters = huggingface.load_adapters(folder, Model(config, mesh))
    with tempfile.TemporaryDirectory() as exported:
        huggingface.save_adapters(exported, config, adapters)
        model = peft.PeftModel.from_pretrained(read(HERE / name)[0], exported)
        logits = logits_of(model.eval(), golden["tokens"], golden["valid"])
    difference = np.abs(logits - np.load(folder / "golden.npz")["logits"]).max()
    print(f"{folder.name}: largest difference {difference:.1e}")
    return difference < 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="fixtures; all by default")
    arguments = parser.parse_args()
    names = arguments.names or [*ADAPTERS, *KINDS, "starts"]
    if arguments.check:
        folders = {name: HERE / "adapters" / name for name in names if name in ADAPTERS}
        kinds = {kind: HERE / "adapters_of_kinds" / kind for kind in names if kind in KINDS}
        passed = [check(name, folder) for name, folder in folders.items()]
        passed += [check(KINDS[kind][0], folder) for kind, folder in kinds.items()]
        sys.exit(0 if all(passed) else 1)
    for name in names:
        if name == "starts":
            make_starts()
        elif name in KINDS:
            make_kind(name)
        else:
            make(Path(name).name)


if __name__ == "__main__":
    main()
