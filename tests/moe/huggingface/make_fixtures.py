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
from fixture_models import CALLED, IN_BFLOAT16, IN_TWO_FILES, MODELS, SIZES, WITH_CHOICES

HERE = Path(__file__).parent
BATCH, TIME = 4, 11


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
