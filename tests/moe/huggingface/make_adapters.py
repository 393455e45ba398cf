"""Small random adapters as PEFT writes them beside the checkpoints here, and the logits it gives.

    python tests/moe/huggingface/make_adapters.py [NAME...]  writes them anew
    python tests/moe/huggingface/make_adapters.py --check    PEFT reads what we export

Needs torch, transformers, peft and this repository on the path. Each folder ``adapters/NAME`` holds
PEFT's two files and golden.npz: float32 logits of the tokens in the checkpoint's own golden.npz.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
from make_fixtures import HERE, logits_of, read

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


def make(name):
    folder = HERE / "adapters" / name
    config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **ADAPTERS[name])
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
    logits = logits_of(model.eval(), golden["tokens"], golden["valid"])
    np.savez_compressed(folder / "golden.npz", logits=logits)
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")


def check(name):
    """Import, export, and the logits of PEFT with what was exported."""
    from dataclasses import replace

    from moe import huggingface
    from sharding import Layout, fold

    golden, mesh = np.load(HERE / name / "golden.npz"), fold(Layout())
    folder = HERE / "adapters" / name
    config = huggingface.config_from(HERE / name)
    config = replace(config, lora=huggingface.adapters_of(folder, config))
    adapters = huggingface.load_adapters(folder, config, mesh)
    with tempfile.TemporaryDirectory() as exported:
        huggingface.save_adapters(exported, config, adapters)
        model = peft.PeftModel.from_pretrained(read(HERE / name)[0], exported)
        logits = logits_of(model.eval(), golden["tokens"], golden["valid"])
    difference = np.abs(logits - np.load(folder / "golden.npz")["logits"]).max()
    print(f"{name}: largest difference {difference:.1e}")
    return difference < 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="fixtures; all by default")
    arguments = parser.parse_args()
    names = arguments.names or list(ADAPTERS)
    if arguments.check:
        sys.exit(0 if all([check(name) for name in names]) else 1)
    for name in names:
        make(Path(name).name)


if __name__ == "__main__":
    main()
