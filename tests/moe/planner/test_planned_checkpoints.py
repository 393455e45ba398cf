"""A checkpoint's config.json is counted as the network that its reader makes of it, or refused in
one true line."""

import json
import math
import random
from pathlib import Path

import jax
import pytest
from tiers import full_but

from benchmarks.planner.serving.__main__ import main as serve
from moe.config import ModelConfig, training_flops
from moe.huggingface.configuration import config_from, options_from
from moe.planner.__main__ import main
from moe.planner.models import ModelSizes, sizes_from
from moe.weights import axis_sizes, table

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


PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "huggingface/published_configs.json").read_text()
)


def written(folder, options):
    (folder / "config.json").write_text(json.dumps(options))
    return folder


def parameters_of(config, part):
    """Numbers in the weights of a network whose path has `part`, without tracing a program."""
    sizes = axis_sizes(config)
    weights = jax.tree.leaves_with_path(table(config))
    return sum(
        math.prod(sizes[axis] for axis in weight.axes.split())
        for path, weight in weights
        if part in jax.tree_util.keystr(path)
    )


def test_matrices_of_latent_attention_are_those_of_the_network(tmp_path):
    """Of DeepSeek-V3, and of Moonlight, whose queries have no latent vector."""
    for name in ("deepseek-ai/DeepSeek-V3.1", "moonshotai/Moonlight-16B-A3B"):
        folder = written(tmp_path, PUBLISHED["read"][name])
        model, config = sizes_from(folder), config_from(folder)
        assert model.latent is not None and config.mla is not None
        counted = parameters_of(config, "attention")
        norms = config.d_model + config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0)
        assert counted == model.num_layers * (model.attention_parameters + norms)


# One file of each family.
QUICK = {options["model_type"]: name for name, options in PUBLISHED["read"].items()}


@pytest.mark.parametrize("name", full_but(PUBLISHED["read"], *QUICK.values()))
def test_published_files_are_counted_or_refused(name, tmp_path):
    folder = written(tmp_path, PUBLISHED["read"][name])
    config = config_from(folder)
    if config.delta is not None:
        with pytest.raises(ValueError, match=r"Gated DeltaNet \(delta\), which 36 of 48 layers"):
            sizes_from(folder)
        return
    model = sizes_from(folder)
    # Biases, norms of heads and after layers, sinks and gates are left out.
    assert model.parameters == pytest.approx(parameters_of(config, ""), rel=4e-4)
    if config.mla is None:
        assert model.training_flops(4096) == pytest.approx(training_flops(config, 4096), rel=1e-9)
        assert model.training_flops(64) == pytest.approx(training_flops(config, 64), rel=1e-9)
    else:
        # Of the products of queries and keys, 192 numbers each, and of outputs, 128.
        longer = model.training_flops(8192) - model.training_flops(4096)
        assert longer == 3 * model.num_layers * model.num_heads * (192 + 128) * 4096


@pytest.mark.parametrize("name", [*PUBLISHED["refused"]])
def test_files_that_the_network_refuses_are_refused_in_its_words(name, tmp_path):
    folder = written(tmp_path, PUBLISHED["refused"][name])
    with pytest.raises(ValueError) as of_network:
        config_from(folder)
    with pytest.raises(ValueError) as caught:
        sizes_from(folder)
    assert " ".join(str(of_network.value).split()) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_family_is_read_without_the_options_of_its_training(tmp_path):
    options = {**options_from(BASE, "MixtralForCausalLM"), "window_of_mine": 3}
    folder = written(tmp_path, options)
    with pytest.raises(ValueError, match="window_of_mine=3"):
        sizes_from(folder)
    assert sizes_from(folder, ignore=["window_of_mine"]).num_experts == BASE.num_experts
    del options["num_experts_per_tok"]
    with pytest.raises(ValueError, match="num_experts_per_tok"):
        sizes_from(written(tmp_path, options), ignore=["window_of_mine"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config.json"),
        ("[" * 100_000, "config.json"),
        ("[1]", "config.json"),
        (
            '{"model_type": "llama", "vocab_size": 9, "num_hidden_layers": 3}',
            "lacks the option hidden",
        ),
        (
            f'{{"model_type": "llama", "vocab_size": 9, "num_hidden_layers": {2**40}}}',
            "num_hidden_layers=1099511627776 is not supported; supported: at most 10000",
        ),
        ('{"model_type": "deepseek_v2"}', "model_type='deepseek_v2' is not supported"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        sizes_from(tmp_path)
    assert "\n" not in str(caught.value)


VALUES = (None, 0, 1, 3, -1, 2**40, 0.5, float("nan"), True, "", "7", [], [1, 2], {}, "silu")
"""What a file may have in the place of another value."""


def variants(seed, number):
    """Published files with one to three options changed or left out."""
    rng, names = random.Random(seed), [*PUBLISHED["read"]]
    for _ in range(number):
        options = dict(PUBLISHED["read"][rng.choice(names)])
        for name in rng.sample(sorted(options), rng.randint(1, 3)):
            if rng.random() < 0.3:
                del options[name]
            else:
                value = rng.choice(VALUES)
                # Checked annotations take no whole number as a float.
                is_float = type(options[name]) is float and type(value) is int
                options[name] = float(value) if is_float else value
        yield options


def test_changed_files_end_in_sizes_or_one_line(tmp_path):
    ends = {"sizes": 0, "refused": 0}
    for options in variants(seed=1, number=100):
        try:
            assert isinstance(sizes_from(written(tmp_path, options)), ModelSizes)
            ends["sizes"] += 1
        except ValueError as reason:
            assert "\n" not in str(reason)
            assert len(str(reason)) > 30
            ends["refused"] += 1
    assert min(ends.values()) > 20


TRAINING = ("--hardware", "b200x8", "--tokens", "64K", "--program", "megatron-core", "--top", "1")
SERVING = ("--hardware", "h200", "--devices", "40")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "flags"), [(main, TRAINING), (serve, SERVING)])
def test_changed_files_end_in_a_plan_or_one_line(plan, flags, tmp_path, capsys):
    ends = {0: 0, 2: 0}
    for options in variants(seed=2, number=300):
        status = plan([str(written(tmp_path, options)), *flags])
        told = capsys.readouterr()
        ends[status] += 1
        assert bool(told.out) == (status == 0)
        assert len(told.err.splitlines()) == (0 if status == 0 else 1)
    assert min(ends.values()) > (50 if flags == TRAINING else 10)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-ai/DeepSeek-V3.1", "serving plans do not support latent attention"),
        ("zai-org/GLM-4.5-Air", "serving plans need routed experts in all layers"),
        ("Qwen/Qwen3-8B", "a dense model has no experts to serve"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "does not support Gated DeltaNet"),
    ],
)
def test_serving_refuses_unsupported_checkpoints_in_one_line(name, words, tmp_path, capsys):
    folder = written(tmp_path, PUBLISHED["read"][name])
    assert serve([str(folder), "--hardware", "h200"]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert (told.out, len(told.err.splitlines())) == ("", 1)
