"""What a run is made of: settings that reach the network, and those that cannot be."""

import json
from dataclasses import replace

import pytest
from chat_checkpoint import chat_tokenizer, write_tokenizer
from small_runs import small_model, small_recipe, small_run, small_setup

from jrl.config.run import RunConfig
from jrl.recipes import Grpo, Tppo, Vapo
from jrl.recipes.base.recipe import Windows
from jrl.trainer.setup.dry_run import execution
from jrl.trainer.setup.setup import Setup, build_setup
from moe.config import tiny

ROUTER_LOSSES = (
    *("load_balance_coef", "batch_balance_coef", "global_balance_coef"),
    *("router_z_coef", "bias_update_rate"),
)
RATES = {name: 0.5**n for n, name in enumerate(ROUTER_LOSSES)}


def made(run: RunConfig, **given) -> Setup:
    setup = build_setup(run, Grpo(), **given)
    setup.task.close()
    return setup


def test_a_preset_keeps_the_losses_of_its_routers_unless_told():
    config = made(RunConfig()).model
    own = tiny(config.vocab_size)
    assert [getattr(config, name) for name in ROUTER_LOSSES] == [
        getattr(own, name) for name in ROUTER_LOSSES
    ]
    told = made(RunConfig(load_balance_coef=0.0, router_z_coef=0.25)).model
    assert (told.load_balance_coef, told.router_z_coef) == (0.0, 0.25)
    assert replace(told, load_balance_coef=0.01, router_z_coef=0.001) == config


def test_a_network_is_computed_as_the_run_says():
    asked = {"remat": "full", "fsdp": True, "scan_layers": True, "expert_chunks": 2}
    execution = made(RunConfig(**asked)).model.execution
    assert {name: getattr(execution, name) for name in asked} == asked
    with pytest.raises(ValueError, match=r"expert_chunks=2 changes nothing: .* tiny-dense has no"):
        made(RunConfig(model="tiny-dense", expert_chunks=2))


def test_dispatch_is_chosen_once_for_all_passes():
    """And said in the dry run: samplers, scorers and learners have the setup's network."""
    given = {"layout": "dp2 / ep2", "buffer_factor": 0.4}
    setup = made(RunConfig(**given))
    assert setup.model.execution.dispatch == "all_to_all"
    assert setup.networks.policy.config.execution.dispatch == "all_to_all"
    assert setup.model.for_any_routing().execution.dispatch == "all_to_all"
    assert execution(setup)["--dispatch"].startswith("all_to_all (predicted for the links of ")
    assert ": all_gather takes 1." in execution(setup)["--dispatch"]
    roomy = made(RunConfig(layout="dp2 / ep2"))
    assert roomy.model.execution.dispatch == "all_gather"
    assert "an all-to-all at 0.45 of a ring's rate" in execution(roomy)["--dispatch"]
    told = made(RunConfig(**given, dispatch="all_gather"))
    assert execution(told)["--dispatch"] == "all_gather"
    slower = made(RunConfig(layout="dp2 / ep2", buffer_factor=0.4, exchange_rate=0.1))
    assert slower.model.execution.dispatch == "all_gather"
    assert made(RunConfig()).model.execution.dispatch is None


def test_dtypes_reach_the_network_and_what_steps_it():
    assert made(RunConfig()).model.dtype == "float32"
    assert made(RunConfig()).networks.policy.optimizer.gradient_wire == "float32"
    run = RunConfig(dtype="bfloat16", mu_dtype="bfloat16", gradient_wire="bfloat16")
    setup = build_setup(run, Vapo())
    setup.task.close()
    networks, imitator = setup.networks, setup.imitator
    for network in (networks.policy, networks.critic, imitator):
        assert (network.config.dtype, network.optimizer.mu_dtype) == ("bfloat16", "bfloat16")
        assert network.optimizer.gradient_wire == "bfloat16"
    # A network from elsewhere keeps its own, unless the run says otherwise.
    half = small_model(setup.tokenizer.vocab_size, dtype="bfloat16")
    assert made(RunConfig(), model=half).model.dtype == "bfloat16"
    assert made(RunConfig(dtype="float32"), model=half).model.dtype == "float32"


def test_a_network_from_elsewhere_gets_the_losses_that_are_asked_for():
    vocab_size = made(RunConfig()).tokenizer.vocab_size
    model = small_model(vocab_size, selection_bias=True, **dict.fromkeys(ROUTER_LOSSES, 0.0))
    asked = made(RunConfig(**RATES), model=model).model
    assert {name: getattr(asked, name) for name in ROUTER_LOSSES} == RATES
    left = made(RunConfig(), model=model).model
    assert {getattr(left, name) for name in ROUTER_LOSSES} == {0.0}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"load_balance_coef": 0.1, "model": "tiny-dense"}, r"load_balance_coef=0\.1 changes noth"),
        ({"bias_update_rate": 0.1}, r"bias_update_rate=0\.1 changes.*no selection bias.*--bias-up"),
        ({"chat_template": "own.jinja"}, r"chat_template='own\.jinja' needs a tokenizer"),
        ({"system_prompt": "Be."}, r"system_prompt='Be\.' needs a chat template"),
        ({"tokenizer": __file__}, r"test_setup\.py: model of \d+ bytes is not a SentencePiece"),
    ],
)
def test_settings_that_cannot_be_had(run, message):
    with pytest.raises(ValueError, match=message):
        made(RunConfig(**run))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"router_z_coef": -1.0}, r"router_z_coef=-1\.0 must be at least 0"),
        ({"drift_alarm": 0.0}, r"drift_alarm=0\.0 must be above 0"),
        ({"max_staleness": -1}, r"max_staleness=-1 must be at least 0"),
        (
            {"stale_cache": True, "max_staleness": 1},
            r"stale_cache changes nothing at max_staleness=1",
        ),
        ({"rollout_devices": 0}, r"rollout_devices=0 must be at least 1"),
        (
            {"rollout_devices": 2},
            r"rollout_devices=2 and the training devices.* give --max-staleness 1 or more",
        ),
        ({"answer_field": "gold"}, r"answer_field='gold' needs --task jsonl:FILE, not 'sort'"),
        ({"messages_field": "turns"}, r"messages_field='turns' needs --task jsonl:FILE"),
    ],
)
def test_settings_that_are_wrong_by_themselves(run, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**run)


def test_windows_that_cut_nothing_are_refused():
    limit = made(RunConfig()).response_length
    with pytest.raises(
        ValueError, match=rf"window={limit} truncates no response of at most {limit} to"
    ):
        build_setup(RunConfig(), Tppo(window=limit))
    setup = build_setup(RunConfig(), Tppo(window=limit - 1))
    setup.task.close()


def test_packing_on_a_pipeline_is_refused():
    layout = {"layout": "pp2", "model": "small"}
    with pytest.raises(
        ValueError, match=r"packing=True is not supported with pp=2 of layout 'pp2'"
    ):
        build_setup(RunConfig(packing=True, **layout), Tppo())
    setup = build_setup(RunConfig(**layout), Tppo())
    setup.task.close()
    assert not setup.networks.packs


def test_steps_that_need_the_one_before_are_not_sampled_ahead():
    setup = small_setup(run=small_run(max_staleness=1))
    with pytest.raises(ValueError, match=r"max_staleness=1: hapo samples at a temperature that"):
        replace(setup, recipe=small_recipe("hapo"))

    class InWindows(Grpo):
        collection = Windows(3)

    with pytest.raises(ValueError, match=r"max_staleness=1: in_windows continues in each step the"):
        replace(setup, recipe=InWindows())


def test_experts_that_drop_what_sampling_does_not_are_refused():
    setup = small_setup()
    vocab_size = setup.tokenizer.vocab_size
    with pytest.raises(ValueError, match=r"capacity_factor=1\.25 drops.*experts_per_token = 2 or"):
        replace(setup, model=small_model(vocab_size, capacity_factor=1.25))
    roomy = small_model(vocab_size, capacity_factor=2.0)
    assert replace(setup, model=roomy).model.capacity_factor == 2.0
    # Supervised learning alone scores no sample.
    alone = replace(setup, run=replace(setup.run, steps=0), model=roomy)
    dropping = replace(roomy, capacity_factor=1.25)
    assert replace(alone, model=dropping).model.capacity_factor == 1.25


def test_a_network_without_experts_has_nothing_to_replay():
    setup = small_setup()
    dense = small_model(setup.tokenizer.vocab_size, num_experts=0, d_ff=8)
    with pytest.raises(ValueError, match=r"router_replay='R2' has nothing.*no experts\. Leave out"):
        replace(setup, model=dense, recipe=small_recipe(router_replay="R2"))
    assert replace(setup, model=dense).recipe.router_replay is None


def test_a_tokenizer_json_takes_the_place_of_a_character_model(tmp_path):
    folder = write_tokenizer(tmp_path)
    setup = made(RunConfig(tokenizer=str(folder / "tokenizer.json")))
    assert setup.model.vocab_size == setup.tokenizer.vocab_size
    assert setup.format.template is not None
    assert setup.sampler().engine.decoder.stop_ids == setup.tokenizer.stop_ids
    assert len(setup.sampler().engine.decoder.stop_ids) == 2


def test_ids_without_a_token_are_unused_in_the_network(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    setup = made(RunConfig(), tokenizer=tokenizer, model=tiny(tokenizer.vocab_size))
    assert setup.model.unused_ids == ((303, 310),)
    assert setup.sampler().engine.decoder.config.unused_ids == setup.model.unused_ids


def test_a_network_with_ids_that_the_tokenizer_cannot_decode_is_refused(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    model = tiny(tokenizer.vocab_size + 1)
    with pytest.raises(ValueError, match=r"has 311 ids, which it may all sample.* 310"):
        made(RunConfig(), tokenizer=tokenizer, model=model)


def test_the_fields_of_a_file_have_their_flags(tmp_path):
    rows = [{"q": f"{n}?", "gold": n, "turns": [{"role": "user", "content": "x"}]} for n in (1, 2)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    run = RunConfig(task=f"jsonl:{path}", prompt_field="q", answer_field="gold")
    recipe = small_recipe()
    setup = build_setup(run, recipe)
    assert {setup.task.train(0).prompt, setup.task.heldout(0).prompt} == {"1?", "2?"}
    setup.task.close()
