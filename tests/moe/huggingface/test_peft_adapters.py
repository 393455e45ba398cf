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
from moe.adapters import merge_adapters, with_base
from moe.config import Model
from moe.placement import specs

ADAPTERS, OF_KINDS = FIXTURES / "adapters", FIXTURES / "adapters_of_kinds"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())
KINDS = sorted(path.name for path in OF_KINDS.iterdir())


@functools.cache
def adapted(name, layout="dp1"):
    """The network with its adapters, and its weights."""
    config, base = loaded(name, layout)
    config = replace(config, lora=huggingface.adapters_of(ADAPTERS / name, config))
    learned = huggingface.load_adapters(ADAPTERS / name, Model(config, mesh_of(layout)))
    return config, with_base(base, learned, weights.table(config))


@functools.cache
def program(config, layout):
    mesh = mesh_of(layout)
    network = Model(config, mesh)
    rows = P(mesh.dp)
    return on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, network)[0][None],
        mesh,
        (specs(network), rows, rows),
        P(tuple(a for a in mesh.axes if a not in mesh.dp + mesh.tp), mesh.dp + mesh.tp),
    )


def logits_of(config, given, name, layout):
    run = program(config, layout)
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
        merged = merge_adapters(given, weights.table(config))
        found = logits_of(config.without_adapters(), merged, name, layout)
        np.testing.assert_allclose(found[valid], expected[valid], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(NAMES, "deepseek_v3", "qwen3_next"))
def test_adapters_go_back_as_they_came(name, tmp_path):
    config, given = adapted(name)
    huggingface.save_adapters(tmp_path, config, given, base=name)
    written, read = tensors(tmp_path), tensors(ADAPTERS / name)
    # PEFT keeps a copy of a head that has an adapter, and we write zeros if it has none.
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", full_but(KINDS, "patterns"))
def test_ranks_scales_and_modules_of_their_own_give_the_logits_of_peft(kind, tmp_path):
    folder = OF_KINDS / kind
    name = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    valid = golden(name)["valid"]
    with np.load(folder / "golden.npz") as file:
        expected = file["logits"]
    config, base = loaded(name)

    def logits(path):
        ours = replace(config, lora=huggingface.adapters_of(path, config))
        learned = huggingface.load_adapters(path, Model(ours, mesh_of("dp1")))
        statement = weights.table(ours)
        merged = merge_adapters(with_base(base, learned, statement), statement)
        return ours, learned, logits_of(config, merged, name, "dp1")[valid]

    ours, learned, found = logits(folder)
    np.testing.assert_allclose(found, expected[valid], atol=1e-5)
    # The adapters matter, and what is written of them is read again with the same logits.
    assert np.abs(expected - golden(name)["logits"])[valid].max() > 0.2
    huggingface.save_adapters(tmp_path, ours, learned, base=name)
    np.testing.assert_allclose(logits(tmp_path)[2], expected[valid], atol=1e-5)


@pytest.fixture
def changed(tmp_path):
    """Makes a folder of adapters with other options."""

    def make(name="qwen3_moe", **options):
        folder = tmp_path / "adapter"
        shutil.copytree(ADAPTERS / name, folder, dirs_exist_ok=True)
        path = folder / "adapter_config.json"
        kept = json.loads((ADAPTERS / name / "adapter_config.json").read_text()) | options
        path.write_text(json.dumps({key: x for key, x in kept.items() if x is not ...}))
        return folder

    return make


MERGE = r"merge it with PEFT, .*merge_and_unload\(\)"


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        *(("init_lora_weights", each, MERGE) for each in ("pissa", "PiSSA", "olora", "OLoRA")),
        # PEFT itself does not read them as they were trained.
        *(
            ("init_lora_weights", each, "convert it to a plain LoRA with PEFT")
            for each in ("pissa_niter_16", "corda", "loftq", "lora_ga")
        ),
        ("init_lora_weights", "newest", "set it to true if"),
        ("use_dora", True, MERGE),
        ("use_qalora", True, "train a plain LoRA"),
        ("alora_invocation_tokens", [12, 7], "train a plain LoRA"),
        ("arrow_config", {"top_k": 2}, "the folder of one of them"),
        ("kasa_config", {"beta": 1e-4}, MERGE),
        ("monteclora_config", {"sample": 4}, MERGE),
        ("velora_config", {"num_groups": 64}, MERGE),
        ("use_bdlora", {"nblocks": 2}, MERGE),
        ("modules_to_save", ["embed_tokens"], MERGE),
        ("trainable_token_indices", [3], MERGE),
        ("trainable_token_indices", {"embed_tokens": [3]}, MERGE),
        ("layer_replication", [[0, 2], [1, 2]], MERGE),
        ("lora_bias", True, MERGE),
        ("bias", "all", MERGE),
        ("bias", "lora_only", MERGE),
        ("fan_in_fan_out", True, MERGE),
        ("megatron_config", {"num_layers": 2}, "train a plain LoRA"),
        ("peft_type", "ADALORA", MERGE),
        ("peft_type", "VERA", MERGE),
        ("peft_type", ..., MERGE),
    ],
)
def test_what_peft_computes_in_another_way_is_refused_by_name(option, value, instead, changed):
    config, _ = loaded("qwen3_moe")
    message = rf"adapter_config.json: {option}=.* is not supported, as .*{instead}"
    with pytest.raises(ValueError, match=message) as error:
        huggingface.adapters_of(changed(**{option: value}), config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("of_a_later_version", True), ("gates", {"on": 1}), ("use_tora", "all"), ("scale_by", 0.5)],
)
def test_an_option_that_is_not_known_is_refused_unless_it_is_off(option, value, changed):
    config, _ = loaded("qwen3_moe")
    with pytest.raises(ValueError, match=f"not supported: {option}={value!r}".replace("{", "\\{")):
        huggingface.adapters_of(changed(**{option: value}), config)
    lora = huggingface.adapters_of(ADAPTERS / "qwen3_moe", config)
    for off in (None, False, {}, [], ""):
        assert huggingface.adapters_of(changed(**{option: off}), config) == lora


def test_a_start_that_leaves_the_weights_as_they_are_is_that_of_a_plain_lora(changed):
    config, _ = loaded("qwen3_moe")
    lora = huggingface.adapters_of(ADAPTERS / "qwen3_moe", config)
    far = json.loads((OF_KINDS / "starts" / "far.json").read_text())
    for start, distance in far.items():
        given = {"true": True, "false": False}.get(start, start)
        folder = changed(init_lora_weights=given)
        if distance == 0:
            assert huggingface.adapters_of(folder, config) == lora
        else:
            assert distance > 1
            with pytest.raises(ValueError, match=f"init_lora_weights='{start}' is not supported"):
                huggingface.adapters_of(folder, config)
    assert sorted(far.values())[:-2] == [0] * 6
    # Versions before any other start had been thought of write none.
    assert huggingface.adapters_of(changed(init_lora_weights=...), config) == lora


def test_what_says_nothing_about_logits_is_passed_over(changed):
    config, _ = loaded("qwen3_moe")
    options = {
        "lora_dropout": 0.1,
        "task_type": None,
        "inference_mode": False,
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
        "exclude_modules": ["lm_head"],
        "target_modules": ".*proj",
        "eva_config": {"rho": 2.0},
        "corda_config": {"corda_method": "kpm"},
        "loftq_config": {"loftq_bits": 4},
        "ensure_weight_tying": True,
        "runtime_config": {"ephemeral_gpu_offload": True},
        "auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM"},
    }
    lora = huggingface.adapters_of(ADAPTERS / "qwen3_moe", config)
    assert huggingface.adapters_of(changed(**options), config) == lora


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has the pattern '\('"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern=.* must map module names to numbers"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern=.* must map module names"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern=.* must map module names"),
        ({"r": "3"}, "r='3' and lora_alpha=5 must be numbers"),
        ({"r": True}, "r=True and lora_alpha=5 must be numbers"),
        ({"use_rslora": "yes"}, "use_rslora='yes' is not supported"),
    ],
)
def test_ranks_that_are_none_are_one_clear_line(options, message, changed):
    config, _ = loaded("qwen3_moe")
    with pytest.raises(ValueError, match=message):
        huggingface.adapters_of(changed(**options), config)


def test_tensors_of_another_rank_than_the_options_say_are_refused(changed):
    config, _ = loaded("qwen3_moe")
    folder = changed(rank_pattern={"k_proj": 2})
    lora = huggingface.adapters_of(folder, config)
    assert lora.rank == 3
    with pytest.raises(ValueError, match=r"k_proj.lora_A.weight has \(3, 20\), not \(2, 20\)"):
        huggingface.load_adapters(folder, Model(replace(config, lora=lora), mesh_of("dp1")))


def test_adapters_of_another_network_are_refused(changed):
    folder = changed()
    narrow, _ = loaded("llama")
    with pytest.raises(ValueError, match=r"unknown .*layers\.0\.mlp\.experts"):
        lora = huggingface.adapters_of(folder, narrow)
        huggingface.load_adapters(folder, Model(replace(narrow, lora=lora), mesh_of("dp1")))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="use a folder that PEFT wrote"):
        huggingface.adapters_of(folder, loaded("qwen3_moe")[0])
