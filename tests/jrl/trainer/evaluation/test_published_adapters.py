"""Adapters in PEFT's format on the checkpoint that they are of, merged as it is loaded."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from programs import mesh_of
from served import write_checkpoint

from jrl.published.adapters import check_of_checkpoint
from jrl.trainer.evaluation.saved_policy import load_model
from jrl.trainer.evaluation.served_model import open_served_model
from moe import huggingface
from moe.adapters import merge_adapters, with_base
from moe.architecture.lora import Lora
from moe.config import Model
from moe.weights import initialise_trained, table


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint, adapters of two of its matrices, and both merged."""
    folder = tmp_path_factory.mktemp("adapted")
    checkpoint = write_checkpoint(folder / "model")
    config, base = huggingface.load(checkpoint, mesh_of("dp1"))
    config = replace(config, lora=Lora(2, 6.0, ("attention.query", "dense.down")))
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: initialise_trained(config, jax.random.key(0)))
    learned = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    huggingface.save_adapters(folder / "adapters", config, learned)
    merged = merge_adapters(with_base(base, learned, table(config)), table(config))
    assert not np.array_equal(merged.layers.dense.down, base.layers.dense.down)
    return checkpoint, folder / "adapters", merged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_merged_in_float32_whatever_the_network_computes_in(given, dtype):
    checkpoint, adapters, merged = given
    config = replace(huggingface.config_from(checkpoint), dtype=dtype)
    found, _ = load_model(
        checkpoint, Model(config, mesh_of("dp1")), masters=True, adapters=str(adapters)
    )
    chex.assert_trees_all_equal(found, merged)
    plain, _ = load_model(checkpoint, Model(config, mesh_of("dp1")), masters=True)
    assert not np.array_equal(plain.layers.dense.down, merged.layers.dense.down)


def test_a_served_policy_has_them(given):
    checkpoint, adapters, merged = given
    policy = open_served_model(str(checkpoint), adapters=str(adapters))
    assert policy.model.lora is None
    weights, version = policy.versions.load()
    chex.assert_trees_all_equal(weights, merged)
    assert version == 0


def test_what_has_none_of_this_network_is_refused(given):
    checkpoint, adapters, _ = given
    for folder, message in (
        (adapters.parent, rf"lora='.*' has no adapter_config.json: give {adapters}\."),
        (checkpoint, "has no adapter_config.json: give a folder that PEFT or a run wrote"),
    ):
        with pytest.raises(ValueError, match=message):
            open_served_model(str(checkpoint), adapters=str(folder))
    wider = replace(huggingface.config_from(checkpoint), d_model=16)
    with pytest.raises(ValueError, match="does not fit this model"):
        load_model(checkpoint, Model(wider, mesh_of("dp1")), adapters=str(adapters))
    with pytest.raises(ValueError, match=r"needs a published checkpoint .*, and runs/a is a run"):
        check_of_checkpoint(str(adapters), "runs/a", is_checkpoint=False)
    with pytest.raises(ValueError, match=r"lora='x' needs a published checkpoint"):
        open_served_model("runs/a", adapters="x")
