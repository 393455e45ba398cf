"""What is twice in a checkpoint's folder: refused, or read in a documented order."""

import json
import re

import chex
import numpy as np
import pytest
from programs import mesh_of
from public_checkpoints import FIXTURES, copy_of, loaded
from safetensors.numpy import load_file, save_file

from moe import huggingface
from moe.config import Model
from moe.huggingface.adapters import HEAD_COPY
from moe.huggingface.checkpoint import weight_files

TIED, MESH = "qwen3", "dp1"


def write(folder, **tensors):
    """Adds tensors to a checkpoint; None takes one off."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **tensors}
    save_file({name: x for name, x in held.items() if x is not None}, path)


def embedding_of(folder):
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def one_number_apart(embedding):
    changed = embedding.copy()
    changed[-1, -1] += 1
    return changed


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        (lambda embedding: embedding, True),
        (lambda embedding: embedding.astype(np.float64).astype(np.float32), True),
        (one_number_apart, False),
        (lambda embedding: embedding[::-1].copy(), False),
        (lambda embedding: np.zeros_like(embedding), False),
        (lambda embedding: embedding[:-1].copy(), False),
    ],
)
def test_a_head_beside_tied_embeddings_must_be_equal(tmp_path, change, is_read):
    folder = copy_of(TIED, tmp_path / "tied")
    write(folder, **{"lm_head.weight": change(embedding_of(folder))})
    if is_read:
        assert huggingface.load(folder, mesh_of(MESH))[1].head is None
        return
    with pytest.raises(ValueError, match=r"set tie_word_embeddings to false") as error:
        huggingface.load(folder, mesh_of(MESH))
    assert "model.safetensors: lm_head.weight differs" in str(error.value)


def test_the_remedy_for_a_head_beside_tied_embeddings_reads_it(tmp_path):
    folder = copy_of(TIED, tmp_path / "tied")
    head = one_number_apart(embedding_of(folder))
    write(folder, **{"lm_head.weight": head})
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**options, "tie_word_embeddings": False}))
    _, weights = huggingface.load(folder, mesh_of(MESH))
    np.testing.assert_array_equal(weights.head, head.T)


def to_two_files(folder):
    """Two files, an index for them, one tensor in both."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {"model.norm.weight": held["model.norm.weight"]}
    save_file(first, folder / "a.safetensors")
    save_file(held, folder / "b.safetensors")
    return held


@pytest.mark.parametrize("has_index", [False, True])
def test_a_tensor_in_two_files_is_refused(tmp_path, has_index):
    folder = copy_of("llama", tmp_path / "twice")
    held = to_two_files(folder)
    if has_index:
        files = {name: "b.safetensors" for name in held} | {"x": "a.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is there twice.*a\.safetensors .*b\.safetensors"
    ):
        huggingface.load(folder, mesh_of(MESH))


def test_weights_in_one_file_and_in_those_of_an_index_are_refused(tmp_path):
    folder = copy_of("mixtral", tmp_path / "twice")
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights twice, in model\.safetensors and in the files"):
        huggingface.load(folder, mesh_of(MESH))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_other_files_beside_the_weights_are_not_read(tmp_path, name):
    folder = copy_of(name, tmp_path / "beside")
    for other in ("consolidated.safetensors", "optimizer.safetensors"):
        save_file({"model.norm.weight": np.ones(3, np.float32)}, folder / other)
    _, weights = huggingface.load(folder, mesh_of(MESH), dtype="float32")
    chex.assert_trees_all_equal(weights, loaded(name)[1])
    others = [path.name for path in weight_files(folder)[1]]
    assert others == ["consolidated.safetensors", "optimizer.safetensors"]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_adapters_beside_the_weights_are_refused(tmp_path, name):
    folder = copy_of(name, tmp_path / "beside")
    save_file({"x": np.zeros(1, np.float32)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has adapters \(adapter_model\.safetensors\) beside"):
        huggingface.load(folder, mesh_of(MESH))


def test_two_heads_of_a_wrapper_are_refused(tmp_path):
    folder = copy_of("qwen2", tmp_path / "twice")
    held = load_file(folder / "model.safetensors")
    wrapped = {f"language_model.{name}": x for name, x in held.items()}
    save_file({**wrapped, "lm_head.weight": held["lm_head.weight"]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is there twice: as language_model"):
        huggingface.load_weights(folder, Model(loaded("qwen2")[0], mesh_of(MESH)))


@pytest.mark.parametrize(
    ("file", "repeated", "message"),
    [
        ("config.json", '"hidden_size": 7', r"the key 'hidden_size' comes twice, with 7 and 20"),
        ("config.json", '"rope_parameters": {"a": 1, "a": 2}', "the key 'a' comes twice, with 1"),
        ("model.safetensors.index.json", '"weight_map": {"a": "b"}', "'weight_map' comes twice"),
    ],
)
def test_a_key_with_two_values_is_refused(tmp_path, file, repeated, message):
    folder = copy_of("mixtral" if "index" in file else "llama", tmp_path / "twice")
    text = (folder / file).read_text()
    (folder / file).write_text("{" + repeated + ", " + text.removeprefix("{"))
    with pytest.raises(ValueError, match=re.escape(file) + f" is not JSON: .*{message}"):
        huggingface.load(folder, mesh_of(MESH))


def test_a_key_that_comes_twice_with_one_value_is_read(tmp_path):
    folder = copy_of("llama", tmp_path / "twice")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"hidden_size": 20, ' + text.removeprefix("{"))
    assert huggingface.config_from(folder) == huggingface.config_from(FIXTURES / "llama")


@pytest.mark.parametrize("name", ["llama", TIED])
def test_a_head_beside_adapters_must_be_that_of_the_checkpoint(tmp_path, name):
    held = load_file(FIXTURES / name / "model.safetensors")
    head = held.get("lm_head.weight", held["model.embed_tokens.weight"])
    adapters = tmp_path / "adapter_model.safetensors"
    save_file({HEAD_COPY: head}, adapters)
    huggingface.check_head_copy(tmp_path, FIXTURES / name)
    save_file({HEAD_COPY: one_number_apart(head)}, adapters)
    with pytest.raises(ValueError, match=r"lm_head\.base_layer\.weight is not the head of"):
        huggingface.check_head_copy(tmp_path, FIXTURES / name)
