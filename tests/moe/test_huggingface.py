"""Checkpoints written by `transformers` give its logits here, and go out as they came in.

The fixtures are made by huggingface/make_fixtures.py, which also reads our exports back.
"""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh, random_weights
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiers import full_but

from moe import huggingface, model
from moe.attention.rotary import LlamaScaling, YarnScaling
from moe.config import ModelConfig, tiny
from moe.decoding import decode_step, extend, prefill
from moe.execution import Execution
from moe.huggingface.configuration import UNBALANCED
from moe.huggingface.families import FAMILIES
from moe.weights import Transformer, specs
from sharding.collectives import vary

FIXTURES = Path(__file__).parent / "huggingface"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
# Without experts, with them, and with latent heads, shared experts and groups.
QUICK = ["llama", "qwen3_moe", "deepseek_v3"]
# A layout that splits heads, dense hidden units, experts and rows.
MESH = "tp2 dp2 / ep4"


@functools.cache
def golden(name):
    with np.load(FIXTURES / name / "golden.npz") as file:
        return {key: file[key] for key in file}


@functools.cache
def loaded(name, layout="dp1"):
    return huggingface.load(FIXTURES / name, mesh_of(layout), dtype="float32")


@functools.cache
def logits_of(name, layout):
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)
    rows = P(mesh.dp)
    run = on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, config, mesh)[0][None],
        mesh,
        (specs(config, mesh), rows, rows),
        P(tuple(a for a in mesh.axes if a not in mesh.dp + mesh.tp), mesh.dp + mesh.tp),
    )
    tokens, valid = (jnp.asarray(golden(name)[key]) for key in ("tokens", "valid"))
    return np.asarray(run(weights, tokens, valid)[0]).reshape(*valid.shape, -1)


def tensors(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in _read(file)}


def _read(file):
    return load_file(file).items()


def copy_of(name, path):
    """A checkpoint that a test may spoil."""
    shutil.copytree(FIXTURES / name, path)
    return path


def change_options(folder, **changed):
    options = json.loads((folder / "config.json").read_text()) | changed
    kept = {name: value for name, value in options.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def test_every_architecture_has_a_fixture():
    kinds = {json.loads((FIXTURES / n / "config.json").read_text())["model_type"] for n in NAMES}
    assert kinds == {family.model_type for family in FAMILIES}


# Decoding, below, runs the other features on the mesh.
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_weights_are_read_into_their_parts(name):
    config, weights = loaded(name)
    execution = Execution(remat="full", fsdp=True)
    sharded = replace(config, execution=execution)
    parts = huggingface.load_weights(FIXTURES / name, sharded, mesh_of("dp4"))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((parts, weights)))
    own = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(parts))
    assert own < 0.31 * sum(leaf.size for leaf in jax.tree.leaves(parts))


@pytest.mark.parametrize(
    ("name", "layout"),
    full_but(
        [*((name, "dp1") for name in NAMES), ("mixtral", MESH), ("deepseek_v3", MESH)],
        *((name, "dp1") for name in QUICK),
    ),
)
def test_logits_are_those_of_transformers(name, layout):
    valid, expected = golden(name)["valid"], golden(name)["logits"]
    assert np.std(expected[valid]) > 0.3  # else equality would say little
    # float32 through three layers, in another order of sums.
    np.testing.assert_allclose(logits_of(name, layout)[valid], expected[valid], atol=1e-5)


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_an_export_holds_the_tensors_that_were_imported(name, tmp_path):
    config, weights = loaded(name, MESH)
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


def test_a_shard_is_read_without_the_rest_of_its_tensor(monkeypatch):
    """What a process reads is what its devices hold, each distinct piece once."""
    from moe.huggingface import reading

    read = []
    shard = reading._shard

    def counted(files, plan, index):
        out = shard(files, plan, index)
        read.append((plan.name, out.size))
        return out

    monkeypatch.setattr(reading, "_shard", counted)
    _, weights = huggingface.load(FIXTURES / "qwen3_moe", mesh_of(MESH))
    assert sum(size for _, size in read) == sum(x.size for x in jax.tree.leaves(weights))
    experts = weights.layers.experts
    assert experts is not None
    gate = [size for name, size in read if "gate_proj" in name]
    assert gate == [experts.gate.size // 4] * 4
    queries = [size for name, size in read if "q_proj" in name]
    assert queries == [weights.layers.attention.query.size // 2] * 2


@pytest.mark.parametrize(
    "name", full_but(["qwen2", "qwen3", "olmoe", "qwen2_moe", "deepseek_v3"], "deepseek_v3")
)
def test_decoding_gives_the_logits_of_the_whole_sequence(name):
    prompt, layout = 8, MESH
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)

    def local(weights, tokens, valid):
        weights = vary(weights, mesh.axes)
        tokens, valid = vary((tokens, valid), mesh.except_sequence)
        _, cache = prefill(weights, tokens[:, :prompt], valid[:, :prompt], config, mesh)
        cache = extend(cache, tokens.shape[1] - prompt, 1)
        layers = tuple(model.layer_of(weights, index) for index in range(config.num_layers))

        def step(cache, column):
            token, live = (
                jax.lax.dynamic_index_in_dim(x, column, axis=1, keepdims=False)
                for x in (tokens, valid)
            )
            logits, cache = decode_step(layers, weights, cache, token, column, live, config, mesh)
            return cache, logits

        return jax.lax.scan(step, cache, jnp.arange(prompt, tokens.shape[1]))[1][None]

    rows = P(mesh.dp)
    others = tuple(axis for axis in mesh.axes if axis not in mesh.dp + mesh.tp)
    run = on_mesh(
        local, mesh, (specs(config, mesh), rows, rows), P(others, None, mesh.dp + mesh.tp)
    )
    tokens, valid = (jnp.asarray(golden(name)[key]) for key in ("tokens", "valid"))
    steps = np.swapaxes(np.asarray(run(weights, tokens, valid))[0], 0, 1)
    assert steps.shape == golden(name)["logits"][:, prompt:].shape
    np.testing.assert_allclose(steps, golden(name)["logits"][:, prompt:], atol=1e-5)


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
        "unknown model.layers.0.self_attn.sinks (4,)",
        "lm_head.weight is of type I32",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("qwen3_moe", "num_experts", "four", "num_experts would be 'four'"),
        ("qwen3_moe", "hidden_size", 10**400, "d_model would be 1000"),
        ("qwen2", "hidden_size", None, "one of its options is of another type"),
        ("qwen2", "num_attention_heads", 0, "one of its options is of another type"),
        ("qwen3_moe", "vocab_size", 37.0, r"vocab_size would be 37\.0"),
        ("qwen3_moe", "norm_topk_prob", 1, "renormalise would be 1"),
        ("llama", "rope_parameters", [1], "rope_parameters=.* is not supported"),
        ("llama", "rope_parameters", {"rope_theta": "x"}, "rope_base would be 'x'"),
        ("llama", "rope_parameters", {"rope_type": {}}, "rope_type={} is not supported"),
        ("deepseek_v3", "kv_lora_rank", "3", "latent would be LatentHeads"),
    ],
)
def test_an_option_of_another_type_is_one_line(tmp_path, name, option, value, message):
    options = json.loads((FIXTURES / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**options, option: value}))
    with pytest.raises(ValueError, match=message) as caught:
        huggingface.config_from(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


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


def test_a_configuration_nested_too_deeply_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON: maximum recursion"):
        huggingface.config_from(tmp_path)


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


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"model_type": "gpt2"}, r"model_type='gpt2' is not supported.*qwen3_moe"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported"),
        ("llama", {"attention_bias": True}, r"attention_bias=True is not supported"),
        ("llama", {"logit_softcap": 30.0}, r"not supported: logit_softcap=30.0"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config="),
        ("llama", {"rms_norm_eps": ...}, r"has no option rms_norm_eps"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            r"rope_type='longrope' is not supported; the network here has default, llama3 and yarn",
        ),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            r"original_max_position_embeddings too",
        ),
        ("qwen2", {"use_sliding_window": True}, r"use_sliding_window=True is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, r"full_attention in every layer"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"dense layers before all others only"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step=2 is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv=8.0 is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, r"2 x topk_group = 2"),
    ],
)
def test_options_that_are_not_supported_are_named(name, changed, message, tmp_path):
    folder = copy_of(name, tmp_path / "changed")
    change_options(folder, **changed)
    with pytest.raises(ValueError, match=message):
        huggingface.config_from(folder)


def test_options_as_older_files_have_them(tmp_path):
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    folder = copy_of("deepseek_v3", tmp_path / "old")
    change_options(folder, rope_parameters=..., rope_theta=50, rope_scaling=scaling)
    assert huggingface.config_from(folder) == huggingface.config_from(FIXTURES / "deepseek_v3")


def test_routers_come_without_losses_and_biases_that_stay(tmp_path):
    folder = copy_of("deepseek_v3", tmp_path / "trained")
    change_options(folder, router_aux_loss_coef=0.02, aux_loss_alpha=0.001)
    for config in (huggingface.config_from(folder), loaded("qwen3_moe")[0]):
        names = ("load_balance_coef", "router_z_coef", "batch_balance_coef", "global_balance_coef")
        assert [getattr(config, name) for name in names] == [0.0] * 4
        assert config.bias_update_rate == 0.0
    assert huggingface.config_from(folder).selection_bias


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


def test_tensors_that_say_nothing_are_let_through(tmp_path):
    folder = copy_of("qwen3", tmp_path / "more")
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    save_file(held, folder / "model.safetensors")
    _, weights = huggingface.load(folder, mesh_of("dp1"))
    assert weights.head is None


def test_a_sequence_longer_than_the_window_is_refused():
    config, weights = loaded("mistral")
    assert config.sliding_window == 12
    mesh = mesh_of("dp1")
    long = jnp.zeros((1, 13), jnp.int32), jnp.ones((1, 13), bool)
    for call in (
        lambda: model.hidden(weights, *long, config, mesh),
        lambda: model.before_responses(weights, *long, 6, 1, config, mesh),
        lambda: prefill(weights, *long, config, mesh),
    ):
        with pytest.raises(ValueError, match="13 tokens are longer than sliding_window=12"):
            call()


def test_an_own_network_is_exported_as_the_architecture_that_expresses_it(tmp_path):
    config = replace(tiny(13), num_layers=1, d_model=12, num_experts=4, d_expert=6)
    weights = random_weights(config, 0)
    with pytest.raises(ValueError, match="fold_embedding_scale makes embedding_scale 1"):
        huggingface.save(tmp_path / "out", config, weights)
    folded, moved = huggingface.fold_embedding_scale(config, weights)
    huggingface.save(tmp_path / "out", folded, moved, about={"eos_token_id": 2})
    options = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (options["architectures"], options["eos_token_id"]) == (["MixtralForCausalLM"], 2)
    back, again = huggingface.load(tmp_path / "out", mesh_of("dp1"))
    assert back == replace(folded, **UNBALANCED)
    jax.tree.map(np.testing.assert_array_equal, again, moved)
    np.testing.assert_allclose(moved.embedding, weights.embedding * 12**0.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"already holds .safetensors files"):
        huggingface.save(tmp_path / "out", folded, moved)


@pytest.mark.parametrize(
    ("changed", "architecture", "message"),
    [
        ({"head": "value"}, None, "is a critic"),
        ({}, "GPT2LMHeadModel", "architecture='GPT2LMHeadModel' is not supported"),
        ({}, "Qwen3ForCausalLM", "Qwen3ForCausalLM cannot express .*num_experts=8"),
        ({"d_ff": 7}, None, "and no other architecture comes nearer"),
    ],
)
def test_a_network_that_no_architecture_expresses_is_refused(changed, architecture, message):
    config = replace(tiny(13), embedding_scale=1.0, **changed)
    with pytest.raises(ValueError, match=message):
        huggingface.options_from(config, architecture)


def test_weights_of_another_network_and_options_of_it_are_refused(tmp_path):
    config, weights = loaded("llama")
    wider = replace(config, vocab_size=38)
    with pytest.raises(ValueError, match=r"a weight is \(37, 20\), not \(38, 20\)"):
        huggingface.save(tmp_path, wider, weights)
    with pytest.raises(ValueError, match="about has hidden_size"):
        huggingface.save(tmp_path, config, weights, about={"hidden_size": 4})


def test_stretched_wavelengths_at_their_ends():
    """Fast pairs turn as before, slow ones `factor` times more slowly."""
    from moe.attention.rotary import frequencies_of

    plain = frequencies_of(16, 1e4, None)
    for scaling in (
        LlamaScaling(8.0, 1.0, 4.0, original_context=64),
        YarnScaling(8.0, original_context=64),
    ):
        ratio = frequencies_of(16, 1e4, scaling) / plain
        np.testing.assert_allclose(ratio[0], 1.0)
        np.testing.assert_allclose(ratio[-1], 1 / 8)
        assert np.all(np.diff(ratio) <= 0) and len(set(ratio.round(6))) > 2
    with pytest.raises(ValueError, match=r"factor=0.5 would shorten the context"):
        YarnScaling(0.5, original_context=64)


@pytest.mark.slow
def test_gradients_reach_every_weight_alike_on_a_mesh():
    """The features of attention that training on a mesh could get wrong: latent vectors and norms
    of whole projections, whose gradients are sums over ``tp``."""
    for name in ("deepseek_v3", "olmoe"):
        one, many = (gradients(name, layout) for layout in ("dp1", "tp2 dp2 / ep4"))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=5e-6 * np.abs(b).max()),
            many,
            one,
        )


def gradients(name, layout) -> Transformer[np.ndarray]:
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)

    def local(weights, tokens, valid):
        def loss(weights):
            logits, _ = model.next_token_logits(weights, tokens, valid, config, mesh)
            own = jax.nn.logsumexp(logits, axis=-1) ** 2
            per_token = model.align_to_tokens(own, tokens.shape, mesh)
            counted = valid & jnp.roll(valid, 1, axis=1)
            total = jnp.sum(per_token, where=counted)
            return jax.lax.psum(vary(total, mesh.except_sequence), mesh.except_sequence)

        return jax.grad(loss)(weights)

    rows, spec = P(mesh.dp), specs(config, mesh)
    run = on_mesh(local, mesh, (spec, rows, rows), spec)
    return jax.device_get(
        run(weights, *(jnp.asarray(golden(name)[k]) for k in ("tokens", "valid")))
    )


def test_a_configuration_says_what_is_wrong_with_it():
    for changed, message in (
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"num_dense_layers": 3, "d_first": 4}, "num_dense_layers=3 needs experts in the layers"),
        ({"num_dense_layers": 1}, "a width, d_first=0"),
        ({"shared_expert_gate": True}, "needs a shared expert"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(13, **changed)
