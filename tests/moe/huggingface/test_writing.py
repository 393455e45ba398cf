"""Checkpoints go out as they came in, and as the architecture that expresses a network."""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import mesh_of, random_weights
from public_checkpoints import FIXTURES, NAMES, QUICK, change_options, loaded, mesh_for, tensors
from safetensors import safe_open
from tiers import full_but

from moe import huggingface
from moe.config import tiny
from moe.huggingface.configuration import UNBALANCED


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_an_export_holds_the_tensors_that_were_imported(name, tmp_path):
    config, weights = loaded(name, mesh_for(name))
    kind = json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0]
    huggingface.save(tmp_path / "out", config, weights, architecture=kind, file_bytes=20_000)
    before, after = tensors(FIXTURES / name), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value.astype(np.float32), err_msg=key)
    assert huggingface.config_from(tmp_path / "out", dtype="float32") == config
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    for key, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "numpy") as opened:
            assert key in opened.keys()  # noqa: SIM118


def test_half_precision_comes_in_and_goes_out(tmp_path):
    config, weights = loaded("mistral")
    assert huggingface.config_from(FIXTURES / "mistral").dtype == "bfloat16"
    huggingface.save(tmp_path / "out", config, weights, dtype="bfloat16")
    before, after = tensors(FIXTURES / "mistral"), tensors(tmp_path / "out")
    for key, value in before.items():
        assert after[key].dtype == value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(after[key].view(np.uint16), value.view(np.uint16))


def test_the_longest_sequence_is_read_and_written(tmp_path):
    config, weights = loaded("qwen3")
    assert config.max_positions == 64
    huggingface.save(tmp_path / "same", config, weights)
    assert huggingface.config_from(tmp_path / "same").max_positions == 64
    about = {"max_position_embeddings": 16}
    huggingface.save(tmp_path / "shorter", config, weights, about=about)
    assert huggingface.config_from(tmp_path / "shorter").max_positions == 16
    change_options(tmp_path / "same", max_position_embeddings=...)
    assert huggingface.config_from(tmp_path / "same").max_positions is None


def test_an_own_network_is_exported_as_the_architecture_that_expresses_it(tmp_path):
    config = replace(tiny(13), num_layers=1, d_model=12, num_experts=4, d_expert=6)
    weights = jax.device_put(random_weights(config, 0))
    with pytest.raises(ValueError, match="fold_embedding_scale sets embedding_scale to 1"):
        huggingface.save(tmp_path / "out", config, weights)
    folded, moved = huggingface.fold_embedding_scale(config, weights)
    huggingface.save(tmp_path / "out", folded, moved, about={"eos_token_id": 2})
    options = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (options["architectures"], options["eos_token_id"]) == (["MixtralForCausalLM"], 2)
    back, again = huggingface.load(tmp_path / "out", mesh_of("dp1"))
    assert back == replace(folded, **UNBALANCED)
    chex.assert_trees_all_equal(again, moved)
    np.testing.assert_allclose(moved.embedding, weights.embedding * 12**0.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"already has .safetensors files"):
        huggingface.save(tmp_path / "out", folded, moved)


@pytest.mark.parametrize(
    ("changed", "architecture", "message"),
    [
        ({"head": "value"}, None, "a critic"),
        ({}, "GPT2LMHeadModel", "architecture='GPT2LMHeadModel' is not supported"),
        ({}, "Qwen3ForCausalLM", "Qwen3ForCausalLM does not support .*num_experts=8"),
        ({"d_ff": 7}, None, "and no other architecture supports more"),
    ],
)
def test_a_network_that_no_architecture_expresses_is_refused(changed, architecture, message):
    config = replace(tiny(13), embedding_scale=1.0, **changed)
    with pytest.raises(ValueError, match=message):
        huggingface.options_from(config, architecture)


def test_weights_of_another_network_and_options_of_it_are_refused(tmp_path):
    config, weights = loaded("llama")
    wider = replace(config, vocab_size=38)
    with pytest.raises(ValueError, match=r"a weight has shape \(37, 20\), not \(38, 20\)"):
        huggingface.save(tmp_path, wider, weights)
    with pytest.raises(ValueError, match="about has hidden_size"):
        huggingface.save(tmp_path, config, weights, about={"hidden_size": 4})
