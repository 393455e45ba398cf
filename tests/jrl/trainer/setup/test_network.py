"""Every way that a network can be computed in is a flag, reaches it, and is refused in a line."""

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
from small_runs import small_model, small_recipe, small_setup

from jrl.config.files import changeable_settings, check_resumable
from jrl.config.flags import parse_arguments
from jrl.config.run import RunConfig
from jrl.published.settings import RouterSettings
from jrl.recipes import RECIPES
from jrl.trainer.setup.dry_run import execution
from jrl.trainer.setup.network import (
    buffers_explained,
    check_overlaps,
    check_shardable,
    check_supported,
    lora_of,
    network_of,
    with_dispatch,
)
from jrl.trainer.setup.setup import build_setup
from moe.attention import context_parallel as context
from moe.attention import core, latent
from moe.config import PRESETS, Model, ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution
from moe.experts import feed_forward
from moe.experts.dispatch import choice as dispatch
from moe.kernels import choice as kernel_choice
from sharding.folding import Layout, fold_abstract

# Other than the default, all of them.
FLAGS = {
    "context": "ring",
    "dispatch": "two_level",
    "server_devices": 4,
    "exchange_rate": 0.75,
    "activation_wire": "float8_e4m3fn",
    "attention": "blocked",
    "decode_attention": "plain",
    "latent": "expanded",
    "router": "plain",
    "experts": "batched",
    "remat": "selective",
    "fsdp": True,
    "overlap_grad_reduce": True,
    "buffer_factor": 1.5,
    "scan_layers": True,
    "vocab_chunk": 64,
    "expert_chunks": 2,
    "two_batch_overlap": True,
}
ALONE = ("fsdp", "overlap_grad_reduce", "two_batch_overlap")
"""Flags that take no value."""
LATENT = small_model(
    11,
    num_kv_heads=4,
    mla=MultiHeadLatentAttention(4, None, 2, 6),
)
OF_ROUTERS = {
    "load_balance_coef": 0.5,
    "batch_balance_coef": 0.25,
    "global_balance_coef": 0.125,
    "router_z_coef": 0.75,
    "bias_update_rate": 0.0,
    "capacity_factor": 1.25,
    "drop_policy": "position",
    "drop_scope": "full_sequence",
}


def test_every_field_of_execution_is_a_flag():
    """Of the same name and default, which a resumed run may change, and reaches the network."""
    assert FLAGS.keys() == {field.name for field in fields(Execution)}
    # One of them changes values.
    assert FLAGS.keys() - {"activation_wire"} <= set(changeable_settings(RunConfig))
    assert "activation_wire" not in changeable_settings(RunConfig)
    words = [
        word
        for name, value in (FLAGS | OF_ROUTERS).items()
        for word in [f"--{name.replace('_', '-')}", *([] if name in ALONE else [str(value)])]
    ]
    run = parse_arguments(["grpo", *words]).run
    network = network_of(LATENT, run)
    assert network.execution == Execution(**FLAGS) and OF_ROUTERS.keys() == {
        item.name for item in fields(RouterSettings)
    }
    assert {name: getattr(network, name) for name in OF_ROUTERS} == OF_ROUTERS
    plain = network_of(LATENT, RunConfig())
    assert plain == LATENT and plain.execution == Execution()
    recipe = RECIPES["grpo"]()
    begun = RunConfig(activation_wire=FLAGS["activation_wire"])
    check_resumable((begun, recipe), (RunConfig(**FLAGS), recipe))


def test_a_flag_names_what_there_is():
    hints = get_type_hints(RunConfig)
    known = {
        "context": context.IMPLEMENTATIONS,
        "dispatch": dispatch.IMPLEMENTATIONS,
        "attention": core.IMPLEMENTATIONS,
        "latent": latent.IMPLEMENTATIONS,
        "experts": feed_forward.IMPLEMENTATIONS,
    }
    for name, names in known.items():
        (literal, _) = get_args(hints[name])
        assert set(get_args(literal)) == set(names), name
    assert RunConfig().without_implementations.keys() <= FLAGS.keys()
    for name in ("drop_policy", "drop_scope"):
        assert get_args(hints[name])[0] == get_type_hints(ModelConfig)[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dispatch": "all_gather"}, r"dispatch='all_gather' changes nothing.*tiny has no experts"),
        (
            {"experts": "tiles"},
            r"experts='tiles' changes nothing.*no experts\. Leave out --experts",
        ),
        ({"router": "plain"}, r"router='plain' changes nothing"),
        ({"buffer_factor": 1.5}, r"buffer_factor=1\.5 changes nothing.*Leave out --buffer-factor"),
        ({"capacity_factor": 2.0}, r"capacity_factor=2\.0 changes nothing.*no experts"),
        (
            {"latent": "expanded"},
            r"latent='expanded' changes.*no latent attention\. Leave out --la",
        ),
        ({"activation_wire": "float8_e4m3fn"}, r"activation_wire='float8_e4m3fn' changes no.*no e"),
        ({"vocab_chunk": 0}, r"vocab_chunk=0 must be at least 1"),
        ({"fsdp": True}, r'fsdp with remat="none" keeps every all-gathered layer'),
    ],
)
def test_what_changes_nothing_is_refused(given, message):
    dense = small_model(11, num_experts=0, d_ff=8)
    with pytest.raises(ValueError, match=message):
        network_of(dense, RunConfig(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drop_policy": "probs"}, r"drop_policy='probs' changes nothing without a capacity"),
        (
            {"drop_scope": "full_sequence"},
            r"drop_scope=.* give --capacity-factor, or leave out --d",
        ),
        ({"capacity_factor": 0.0}, r"capacity_factor=0\.0 must be above 0; None drops no tokens"),
        ({"bias_update_rate": 0.1}, r"bias_update_rate=0\.1 changes nothing.*no selection bias"),
    ],
)
def test_drops_need_a_capacity(given, message):
    with pytest.raises(ValueError, match=message):
        network_of(small_model(11), RunConfig(**given))


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        ({"context": "ulysses"}, "cp8", r"splits the 4 query heads of a tp rank over cp=8, which"),
        ({"context": "ring", "attention": "xla"}, "cp2", r"not execution\.attention='xla'"),
        ({"dispatch": "ragged"}, "dp2 / ep2", r'dispatch="ragged" needs jax\.lax\.ragged_all_to'),
        (
            {"experts": "mosaic"},
            "dp1",
            r"experts='mosaic' is a kernel for .*Hopper, not",
        ),
        (
            {"activation_wire": "float8_e4m3fn"},
            "dp2",
            r"activation_wire='float8_e4m3fn' changes nothing on layout .* dp2.*no token is sent",
        ),
        ({"router": "mosaic"}, "dp1", r"router='mosaic' is a kernel.*leave out --router\."),
        ({"attention": "cudnn"}, "dp1", r"attention='cudnn' takes bfloat16 on NVIDIA GPUs"),
        ({"attention": "mosaic"}, "dp1", r"attention='mosaic' is a kernel.*out --attention\."),
    ],
)
def test_what_cannot_serve_is_refused_before_anything_is_compiled(given, layout, message):
    config = replace(small_model(11), execution=Execution(**given))
    with pytest.raises(ValueError, match=message):
        check_supported(Model(config, fold_abstract(Layout.parse(layout), "cpu")))
    assert "\n" not in message
    check_supported(
        Model(replace(config, execution=Execution()), fold_abstract(Layout.parse(layout), "cpu"))
    )


def test_meshes_of_learning_and_of_sampling_are_refused_before_anything_is_compiled():
    model = small_model(11)  # two heads of keys
    whole, cut = (fold_abstract(Layout.parse(layout)) for layout in ("dp4", "tp4"))
    with pytest.raises(ValueError, match=r"'kv_head' of size 2 .* over 4 devices \(layout tp4 "):
        check_shardable(model, cut, whole)
    with pytest.raises(ValueError, match=r"'kv_head' of size 2 .* over 4 devices \(layout tp4 "):
        check_shardable(model, whole, cut)
    check_shardable(model, whole, fold_abstract(Layout.parse("tp2 dp2")))
    run = RunConfig(layout="dp4", rollout_layout="tp4")
    with pytest.raises(ValueError, match=r"'kv_head' of size 2 .* over 4 devices \(layout tp4 "):
        build_setup(run, RECIPES["grpo"]())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp8 / ep8", 'layout tp1 cp1 dp8 pp1 / ep8 etp1 edp1: ep8 needs .* "tp1 cp1 dp8 pp1"'),
        ("tp2 dp2 / etp4", 'etp4 needs experts, and a dense network has none: write "tp2 cp1 dp2'),
        ("tp2 dp2 / ep2 etp2", "ep2 etp2 needs experts"),
        ("tp2 pp2 vpp2 / ep2", 'write "tp2 cp1 dp1 pp2 vpp2"'),
    ],
)
def test_dense_network_refuses_layout_of_experts(layout, message):
    mesh = fold_abstract(Layout.parse(layout))
    with pytest.raises(ValueError, match=message) as refusal:
        check_shardable(PRESETS["tiny-dense"](40), mesh)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["layout", "rollout_layout"])
def test_dense_run_refuses_layout_of_experts(name):
    layouts = {"layout": "dp4", "rollout_layout": "dp4"} | {name: "dp4 / ep4"}
    with pytest.raises(ValueError, match="ep4 needs experts"):
        build_setup(RunConfig(model="tiny-dense", **layouts), RECIPES["grpo"]())


def test_kernels_are_refused_on_gpus_that_they_are_not_written_for(monkeypatch):
    gpu = fold_abstract(Layout.parse("dp1"), "gpu")
    model = small_model(11, head_dim=64, dtype="bfloat16")
    kernels = {"decode_attention": "mosaic", "router": "mosaic", "experts": "mosaic"}
    kernels["attention"] = "mosaic"
    refused = {8.0: set(kernels), 9.0: set(), 10.0: set(kernels) - {"router"}}
    for capability, names in refused.items():
        monkeypatch.setattr(kernel_choice, "capability", lambda capability=capability: capability)
        for name, value in kernels.items():
            config = replace(model, execution=Execution(**{name: value}))
            if name in names:
                message = (
                    rf"{name}='{value}' does not support GPUs of capability {capability}.*leave"
                )
                with pytest.raises(ValueError, match=message):
                    check_supported(Model(config, gpu))
            else:
                check_supported(Model(config, gpu))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small_model(11, dtype="bfloat16"), r"heads of 6 elements .*--decode-attention\.$"),
        (LATENT, r"vectors of float32 .*--decode-attention, or give --dtype bfloat16\.$"),
    ],
)
def test_a_cache_that_the_kernel_cannot_read_is_refused(config, message):
    gpu = fold_abstract(Layout.parse("dp1"), "gpu")
    attends = replace(config, execution=Execution(attention="mosaic"))
    instead = "" if config.dtype == "bfloat16" else ", or give --dtype bfloat16"
    with pytest.raises(
        ValueError, match=rf"is not supported: .*: leave out --attention{instead}\.$"
    ):
        check_supported(Model(attends, gpu))
    config = replace(config, execution=Execution(decode_attention="mosaic"))
    with pytest.raises(ValueError, match=rf"decode_attention='mosaic' is not supported: {message}"):
        check_supported(Model(config, gpu))


def test_a_cache_of_latent_attention_has_a_kernel():
    sizes = MultiHeadLatentAttention(512, None, 64, 64)
    config = replace(LATENT, head_dim=128, mla=sizes, dtype="bfloat16")
    for kept in (None, "expanded"):
        execution = Execution(decode_attention="mosaic", latent=kept)
        gpu = fold_abstract(Layout.parse("dp1"), "gpu")
        check_supported(Model(replace(config, execution=execution), gpu))


def test_one_device_takes_any_way_over_cp():
    """A layout may change when a run is resumed."""
    for name in context.IMPLEMENTATIONS:
        config = small_model(11, execution=Execution(context=name, attention="plain"))
        check_supported(Model(config, fold_abstract(Layout.parse("dp2"), "cpu")))


def test_a_dry_run_shows_how_it_computes():
    setup = small_setup()
    rows = execution(setup)
    assert "--context" not in rows and "--latent" not in rows and "--drop-policy" not in rows
    assert rows["--dispatch"] == rows["--attention"] == "the best that applies"
    assert (rows["--vocab-chunk"], rows["--buffer-factor"]) == ("8192", "worst case")
    assert (rows["--router"], rows["--fsdp"], rows["--remat"]) == ("plain", "off", "none")
    # What None picks is told if it depends on no batch.
    model = small_model(11, num_kv_heads=4, capacity_factor=2.0)
    over_cp = replace(setup, model=model, mesh=fold_abstract(Layout.parse("cp4"), "cpu"))
    found = execution(over_cp)
    assert found["--context"] == "ulysses (sends least)"
    # (4 + 4) heads, of 6 + 6 elements, to three devices of four.
    sent = "72 elements per token and layer, forward"
    assert found["sent over cp by attention"] == sent
    assert execution(over_cp)["--drop-policy"] == "probs"
    chosen = replace(model, execution=Execution(**FLAGS))
    found = execution(replace(over_cp, model=chosen))
    assert {found[f"--{name.replace('_', '-')}"] for name in ("context", "experts")} == {
        "ring",
        "batched",
    }


@pytest.mark.parametrize(
    ("field", "layout", "parts", "message"),
    [
        ("overlap_grad_reduce", "pp2 dp2", 2, r"on layout .*pp2.*: the stages of a pipeline sum"),
        ("overlap_grad_reduce", "dp1", 2, r"there is no other device .* Leave out --overlap-grad"),
        ("two_batch_overlap", "dp2 / ep2", 1, r"has nothing to halve: .* leave out --two-batch-ov"),
    ],
)
def test_what_overlaps_nothing_is_refused(field, layout, parts, message):
    model = small_model(11, execution=Execution(**{field: True}))
    with pytest.raises(ValueError, match=message):
        check_overlaps(Model(model, fold_abstract(Layout.parse(layout))), parts)
    check_overlaps(Model(model, fold_abstract(Layout.parse("dp2 / ep2"))), 2)


def test_halves_that_cannot_be_had_are_refused_before_anything_is_compiled():
    """Of two prompts of 8 tokens with two responses of 5 each, one has 18 tokens."""
    run = RunConfig(layout="tp4", two_batch_overlap=True, prompt_length=8, response_length=5)
    model = small_model(11, num_kv_heads=4, execution=Execution(two_batch_overlap=True))
    setup = small_setup(small_recipe(micro_batch=4), run, model=model)
    geometry = replace(setup.geometry, prompt_length=8, response_length=5)
    parts, halves = geometry.overlap_units(packing=None)
    assert (parts, halves) == (2, (18, 18)) and geometry.overlap_units(packing=True)[1] == ()
    with pytest.raises(
        ValueError, match=r"a half-batch of 18 tokens cannot be split over cp x tp = 4 "
    ):
        check_overlaps(Model(model, setup.mesh), parts, halves)
    whole = replace(geometry, response_length=6)
    check_overlaps(Model(model, setup.mesh), *whole.overlap_units(packing=None))
    full = replace(model, capacity_factor=0.8)
    with pytest.raises(ValueError, match=r"capacity_factor=0\.8 would drop other tokens"):
        check_overlaps(Model(full, setup.mesh), *whole.overlap_units(packing=None))


SHARED = Layout.parse("dp2 / ep2")


def of_mesh(run, layout, platform):
    mesh = fold_abstract(layout, platform)
    return with_dispatch(network_of(ModelConfig(vocab_size=8), run), run, mesh)


@pytest.mark.parametrize(
    ("layout", "platform", "given", "chunks"),
    [
        (SHARED, "gpu", {}, 2),
        (SHARED, "gpu", {"expert_chunks": 1}, 1),
        (SHARED, "gpu", {"expert_chunks": 3}, 3),
        (SHARED, "gpu", {"two_batch_overlap": True}, 1),
        (Layout(), "gpu", {}, 1),
        (SHARED, "cpu", {}, 1),
        (SHARED, "tpu", {}, 1),
    ],
)
def test_with_dispatch_sends_two_chunks_on_gpus_that_share_experts(layout, platform, given, chunks):
    run = RunConfig(model="tiny-moe", dtype="bfloat16", **given)
    assert of_mesh(run, layout, platform).execution.num_chunks == chunks


def test_gpus_that_share_experts_have_buffers_of_balanced_load_by_default():
    """A multiple that is given stays, and 0 is buffers for any routing."""
    base = RunConfig(model="tiny-moe", dtype="bfloat16")
    shared, alone = SHARED, Layout()

    def buffers(run, layout, platform):
        model = of_mesh(run, layout, platform)
        return model.execution.buffer_factor, buffers_explained(model, run)

    factor, explained = buffers(base, shared, "gpu")
    assert factor == 1.5
    assert (explained or "").startswith("1.5 (buffers for any routing are")
    for layout, platform in ((shared, "cpu"), (shared, "tpu"), (alone, "gpu")):
        assert buffers(base, layout, platform) == (None, None)
    assert buffers(replace(base, buffer_factor=2.0), shared, "gpu") == (2.0, None)
    assert buffers(replace(base, buffer_factor=0.0), shared, "gpu") == (None, None)


def test_adapters_are_aimed_by_module_names():
    model = PRESETS["tiny-dense"](40)

    def lora(targets):
        return lora_of(model, RunConfig(lora_rank=2, lora_targets=targets))

    assert lora("q_proj,k_proj,v_proj,o_proj") == lora("attention")
    assert lora("all-linear") == lora(None)
    assert lora("q_proj,v_proj").targets == ("attention.query", "attention.value")
    assert lora("attention.query,attention.value") == lora("q_proj,v_proj")
    with pytest.raises(ValueError, match=r"has 'query', which .*: choose among down_proj"):
        lora("query")
