"""LoRA targets by module name follow the published checkpoint, and its adapters say them."""

import json
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from programs import mesh_of
from safetensors.numpy import load_file

from jrl.published.adapters import targets_from_modules
from moe import huggingface
from moe.architecture.lora import Lora
from moe.config import PRESETS, Model
from moe.weights import adaptable_weights, initialise_trained, table, targets_of

FIXTURES = Path(__file__).parents[2] / "moe" / "huggingface"


@pytest.mark.parametrize(
    ("name", "modules", "targets"),
    [
        ("llama", "q_proj,k_proj,v_proj,o_proj", "attention"),
        ("llama", "q_proj,v_proj", "attention.query,attention.value"),
        ("llama", "self_attn.q_proj,mlp.down_proj", "attention.query,dense.down"),
        ("llama", "gate_proj,up_proj,down_proj,lm_head", "dense,head"),
        ("gemma3", "all-linear", "attention,dense"),
        ("mixtral", "w1,w3,attention", "attention,experts.gate_up"),
        ("qwen3_moe", "mlp.experts.gate_up_proj,mlp.experts.down_proj", "experts"),
        ("gpt_oss", "mlp.experts.gate_up_proj", "experts.gate_up"),
        ("deepseek_v3", "q_a_proj,q_b_proj", "attention.query_down,attention.query"),
        ("deepseek_v3", "kv_a_proj_with_mqa,kv_b_proj", "attention.down,attention.up"),
        ("deepseek_v3", "gate_proj,up_proj,down_proj", "experts,dense,shared"),
        ("deepseek_v3", "shared_experts.down_proj", "shared.down"),
        ("qwen3_next", "all-linear,lm_head", "attention,experts,shared,head"),
    ],
)
def test_modules_are_meant_by_the_ends_of_their_names(name, modules, targets):
    config = huggingface.config_from(FIXTURES / name)
    assert targets_from_modules(config, modules.split(",")) == tuple(targets.split(","))


def test_presets_have_the_modules_of_an_architecture_like_them():
    assert targets_from_modules(PRESETS["tiny-dense"](40), ["q_proj", "k_proj"]) == (
        "attention.query",
        "attention.key",
    )


@pytest.mark.parametrize(
    ("name", "modules", "message"),
    [
        (
            "llama",
            "q_proj,wq",
            r"has 'wq', which no .*: choose among down_proj,gate_proj,.*all-lin",
        ),
        ("llama", "proj", "has 'proj', which"),
        ("llama", "", "has '', which"),
        ("llama", "gate_proj", "has a part of gate_proj and up_proj, which are one weight here"),
        ("qwen3", "lm_head", "has 'lm_head', which"),  # tied
        ("qwen3_moe", "up_proj,q_proj", "has a part of gate_proj and up_proj"),
        ("qwen3_moe", "shared,q_proj", "has 'shared', which"),
    ],
)
def test_what_names_no_module_is_refused(name, modules, message):
    config = huggingface.config_from(FIXTURES / name)
    with pytest.raises(ValueError, match=message) as refusal:
        targets_from_modules(config, modules.split(","))
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="choose among attention,experts,shared,head or all"):
        targets_from_modules(PRESETS["small"](40), ["q_proj"])


def test_a_part_of_a_group_is_written_and_read_under_its_names(tmp_path):
    config = huggingface.config_from(FIXTURES / "deepseek_v3")
    targets = targets_from_modules(config, ["o_proj", "mlp.down_proj", "kv_b_proj"])
    assert targets == ("attention.up", "attention.out", "dense.down")
    config = replace(config, lora=Lora(3, 6.0, targets))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: initialise_trained(config, jax.random.key(0)))
    learned = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    huggingface.save_adapters(tmp_path, config, learned)
    modules = {
        name.split(".layers.")[1].split(".", 1)[1]
        for name in load_file(tmp_path / "adapter_model.safetensors")
    }
    assert {name.partition(".lora")[0] for name in modules} == {
        *("self_attn.o_proj", "self_attn.kv_b_proj", "mlp.down_proj")
    }
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    assert options["target_modules"] == ["self_attn.kv_b_proj", "self_attn.o_proj"]
    assert options["target_parameters"] == ["mlp.down_proj.weight"]
    assert huggingface.adapters_of(tmp_path, config) == config.lora
    read = huggingface.load_adapters(tmp_path, Model(config, mesh_of("dp1")))
    chex.assert_trees_all_equal(read, learned)


def test_weights_are_named_by_their_targets():
    config = huggingface.config_from(FIXTURES / "qwen2_moe")
    weights = adaptable_weights(config)
    assert {name.partition(".")[0] for name in weights} == set(targets_of(config))
    leaves = jax.tree.leaves(table(config))
    axes = {leaves[index].axes for index in weights["dense.down"]}
    assert axes == {"first_layer dense_d_ff d_model"}
