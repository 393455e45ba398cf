"""Tensors of checkpoints written by `transformers` into weights: what is read, what is refused."""

import json
import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from programs import mesh_of, random_weights
from public_checkpoints import FIXTURES, MESH, NAMES, copy_of, loaded, tensors
from safetensors.numpy import load_file, save_file
from tiers import full_but

from moe import huggingface
from moe.config import Model, tiny
from moe.execution import Execution
from moe.huggingface.configuration import FAMILIES
from moe.placement import in_layer_order, shardings


def test_every_architecture_has_a_fixture():
    kinds = {json.loads((FIXTURES / n / "config.json").read_text())["model_type"] for n in NAMES}
    assert kinds == {kind for family in FAMILIES for kind in (family.model_type, *family.also)}


# Decoding (test_public_logits.py) runs the other features on the mesh.
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_weights_are_read_into_their_parts(name):
    config, weights = loaded(name)
    execution = Execution(remat="full", fsdp=True)
    sharded = replace(config, execution=execution)
    parts = huggingface.load_weights(FIXTURES / name, Model(sharded, mesh_of("dp4")))
    chex.assert_trees_all_equal(parts, weights)
    own = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(parts))
    assert own < 0.31 * sum(leaf.size for leaf in jax.tree.leaves(parts))


@pytest.mark.parametrize("layout", full_but(["pp2", "pp2 vpp2", "pp3 dp2"], "pp2 vpp2"))
def test_weights_are_read_into_stages(layout, tmp_path):
    """In chunks, and in chunks of which one is a layer shorter."""
    number = 4 if "vpp" in layout else 5 if "dp" in layout else 3
    own = replace(tiny(12), num_layers=number, d_model=12, num_experts=4, d_expert=6)
    own = replace(own, embedding_scale=1.0)
    mesh, weights = mesh_of(layout), jax.device_put(random_weights(own, 0))
    huggingface.save(tmp_path / "out", own, weights)
    config, _ = huggingface.load(tmp_path / "out", mesh_of("dp1"))
    model = Model(config, mesh)
    found = huggingface.load_weights(tmp_path / "out", model)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(shardings(model)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    back = in_layer_order(jax.device_get(found), mesh, number)
    chex.assert_trees_all_equal(back, weights)


def test_a_shard_is_read_without_the_rest_of_its_tensor(monkeypatch):
    """What a process reads is what its devices hold, each distinct piece once."""
    from moe.huggingface import checkpoint

    read = []
    shard = checkpoint._shard

    def counted(files, plan, index):
        out = shard(files, plan, index)
        read.append((plan.name_templates, out.size))
        return out

    monkeypatch.setattr(checkpoint, "_shard", counted)
    _, weights = huggingface.load(FIXTURES / "qwen3_moe", mesh_of(MESH))
    assert sum(size for _, size in read) == sum(x.size for x in jax.tree.leaves(weights))
    experts = weights.layers.experts
    assert experts is not None
    both = [size for (name, *rest), size in read if "gate_proj" in name and "up_proj" in rest[0]]
    assert both == [experts.gate_up.size // 4] * 4
    queries = [size for (name, *_), size in read if "q_proj" in name]
    assert queries == [weights.layers.attention.query.size // 2] * 2


@pytest.mark.slow
def test_a_vocabulary_that_tp_divides_is_read_in_parts(tmp_path):
    """Files have all of its rows, as from one device."""
    config = replace(tiny(14), num_layers=1, d_model=12, num_experts=4, d_expert=6)
    weights = jax.device_put(random_weights(config, 0))
    config, weights = huggingface.fold_embedding_scale(config, weights)
    huggingface.save(tmp_path / "one", config, weights)
    _, parts = huggingface.load(tmp_path / "one", mesh_of(MESH))
    assert parts.embedding.addressable_shards[0].data.shape == (7, 12)
    assert parts.head is not None
    assert parts.head.addressable_shards[0].data.shape == (12, 7)
    chex.assert_trees_all_equal(parts, weights)
    huggingface.save(tmp_path / "parts", config, parts)
    before, after = tensors(tmp_path / "one"), tensors(tmp_path / "parts")
    assert before["model.embed_tokens.weight"].shape == before["lm_head.weight"].shape == (14, 12)
    chex.assert_trees_all_equal(before, after)


def test_differing_tensors_are_all_listed(tmp_path):
    folder = copy_of("llama", tmp_path / "spoilt")
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"]
    held["model.layers.1.self_attn.q_proj.weight"] = np.zeros((48, 21), np.float32)
    held["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
    held["lm_head.weight"] = held["lm_head.weight"].astype(np.int32)
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors of this LlamaForCausalLM \(4 differ\)") as error:
        huggingface.load(folder, mesh_of("dp1"))
    for part in (
        "missing model.norm.weight (20,)",
        "model.layers.1.self_attn.q_proj.weight is (48, 21), not (48, 20)",
        "unknown model.layers.0.self_attn.sinks (4,) in model.safetensors",
        "lm_head.weight is of type I32",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "content",
    ["", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\ud800"],
    ids=lambda content: content[:20].encode("ascii", "replace").decode(),
)
def test_an_index_that_is_none_is_one_line(tmp_path, content):
    path = tmp_path / "copy"
    shutil.copytree(FIXTURES / "llama", path)
    index = path / "model.safetensors.index.json"
    index.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"index\.json (is not JSON|has no \"weight_map\")"):
        huggingface.load(path, mesh_of("dp1"))


def test_a_missing_file_or_a_broken_one_is_named(tmp_path):
    folder = copy_of("mixtral", tmp_path / "spoilt")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"00002.safetensors cannot be read as safetensors"):
        huggingface.load(folder, mesh_of("dp1"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00002.safetensors cannot be read as safetensors"):
        huggingface.load(folder, mesh_of("dp1"))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no .safetensors file"):
        huggingface.load(folder, mesh_of("dp1"))
    with pytest.raises(ValueError, match=r"config.json cannot be read \(No such file"):
        huggingface.config_from(tmp_path)


def test_tensors_that_say_nothing_are_let_through(tmp_path):
    folder = copy_of("qwen3", tmp_path / "more")
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    save_file(held, folder / "model.safetensors")
    _, weights = huggingface.load(folder, mesh_of("dp1"))
    assert weights.head is None


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    folder = copy_of("qwen3_next", tmp_path / "more")
    held = load_file(folder / "model.safetensors")
    save_file(held | {"mtp.fc.weight": np.zeros((3, 4))}, folder / "model.safetensors")
    _, weights = huggingface.load(folder, mesh_of("dp1"))
    chex.assert_trees_all_equal(weights, loaded("qwen3_next")[1])
    qwen3 = copy_of("qwen3", tmp_path / "qwen3")
    held = load_file(qwen3 / "model.safetensors")
    save_file(held | {"mtp.fc.weight": np.zeros((3, 4))}, qwen3 / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown mtp\.fc\.weight"):
        huggingface.load(qwen3, mesh_of("dp1"))


def renamed(path, prefix, head, **more):
    """A small Qwen2 whose tensors have other names, and others beside them."""
    folder = copy_of("qwen2", path)
    stored = {f"{prefix}{k.removeprefix('model.')}": v for k, v in tensors(folder).items()}
    stored[head] = stored.pop(f"{prefix}lm_head.weight")
    save_file({**stored, **more}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("_orig_mod.model.", "_orig_mod.lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_tensors_of_wrappers_are_read_under_their_usual_names(prefix, head, tmp_path):
    config, expected = loaded("qwen2")
    picture = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
    folder = renamed(tmp_path / "made", prefix, head, **picture)
    if "language_model" not in prefix:
        # It is no part of a network that is text alone.
        with pytest.raises(ValueError, match=r"\(1 differ\): unknown .*vision_tower.patch.weight"):
            huggingface.load_weights(folder, Model(config, mesh_of("dp1")))
        folder = renamed(tmp_path / "alone", prefix, head)
    found = huggingface.load_weights(folder, Model(config, mesh_of("dp1")))
    chex.assert_trees_all_equal(found, expected)


def test_two_networks_in_one_checkpoint_are_refused(tmp_path):
    other = {"draft.embed_tokens.weight": np.ones((2, 2), np.float32)}
    folder = renamed(tmp_path / "made", "model.", "lm_head.weight", **other)
    with pytest.raises(ValueError, match=r"\(1 differ\): unknown draft.embed_tokens.weight"):
        huggingface.load_weights(folder, Model(loaded("qwen2")[0], mesh_of("dp1")))
