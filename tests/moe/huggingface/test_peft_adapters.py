"""Adapters that PEFT wrote give its logits here, beside the weights and merged, and go back as they
came."""

import functools
import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh
from public_checkpoints import FIXTURES, MESH, golden, loaded, tensors
from tiers import full_but

from moe import huggingface, model, weights
from moe.adapters import trees
from moe.placement import specs

ADAPTERS = FIXTURES / "adapters"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())


@functools.cache
def adapted(name, layout="dp1"):
    """The network with its adapters, and its weights."""
    config, base = loaded(name, layout)
    config = replace(config, lora=huggingface.adapters_of(ADAPTERS / name, config))
    learned = huggingface.load_adapters(ADAPTERS / name, config, mesh_of(layout))
    return config, trees.with_base(base, learned, weights.table(config))


def logits_of(config, given, name, layout):
    mesh = mesh_of(layout)
    rows = P(mesh.dp)
    run = on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, config, mesh)[0][None],
        mesh,
        (specs(config, mesh), rows, rows),
        P(tuple(a for a in mesh.axes if a not in mesh.dp + mesh.tp), mesh.dp + mesh.tp),
    )
    tokens, valid = (jnp.asarray(golden(name)[key]) for key in ("tokens", "valid"))
    return np.asarray(run(given, tokens, valid)[0]).reshape(*valid.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "dp1") for name in NAMES), ("qwen3_moe", MESH)],
)
def test_logits_are_those_of_peft(name, layout):
    valid = golden(name)["valid"]
    with np.load(ADAPTERS / name / "golden.npz") as file:
        expected = file["logits"]
    # The adapters matter.
    assert np.abs(expected - golden(name)["logits"])[valid].max() > 0.3
    config, given = adapted(name, layout)
    found = logits_of(config, given, name, layout)
    # A recurrence rounds once a token.
    atol = 2e-5 if name == "qwen3_next" else 1e-5
    np.testing.assert_allclose(found[valid], expected[valid], atol=atol)
    if layout == "dp1" and name == "qwen2":
        merged = trees.merged(given, weights.table(config))
        found = logits_of(config.without_adapters(), merged, name, layout)
        np.testing.assert_allclose(found[valid], expected[valid], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(NAMES, "deepseek_v3", "qwen3_next"))
def test_adapters_go_back_as_they_came(name, tmp_path):
    config, given = adapted(name)
    huggingface.save_adapters(tmp_path, config, given, base=name)
    written, read = tensors(tmp_path), tensors(ADAPTERS / name)
    # PEFT keeps a copy of a head that has an adapter, and we write zeros where it has none.
    read = {key: x for key, x in read.items() if "lora_" in key}
    assert all(np.array_equal(written[key], x) for key, x in read.items())
    assert all(not np.any(x) for key, x in written.items() if key not in read)
    ours, theirs = (
        json.loads((path / "adapter_config.json").read_text())
        for path in (tmp_path, ADAPTERS / name)
    )
    changing = {"target_modules", "target_parameters"}
    assert {key: theirs[key] for key in ours if key not in changing} == {
        key: value for key, value in ours.items() if key not in changing
    }
    assert set(ours["target_modules"]) >= set(theirs["target_modules"])
    assert set(ours["target_parameters"]) == set(theirs["target_parameters"] or ())


def test_what_peft_computes_in_another_way_is_refused_by_name(tmp_path):
    config, _ = loaded("qwen3_moe")
    shutil.copytree(ADAPTERS / "qwen3_moe", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    options = json.loads(path.read_text())
    path.write_text(json.dumps(options | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora=True is not supported"):
        huggingface.adapters_of(tmp_path / "adapter", config)
    path.write_text(json.dumps(options))
    narrow, _ = loaded("llama")
    with pytest.raises(ValueError, match=r"unknown .*layers\.0\.mlp\.experts"):
        lora = huggingface.adapters_of(tmp_path / "adapter", narrow)
        huggingface.load_adapters(tmp_path / "adapter", replace(narrow, lora=lora), mesh_of("dp1"))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="give a folder that PEFT wrote"):
        huggingface.adapters_of(tmp_path / "adapter", config)
