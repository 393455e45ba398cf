import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from annotations import unchecked

from jrl.checks import check_range
from jrl.config.files import check_resumable, from_json, to_json
from jrl.config.run import RunConfig
from jrl.recipes import RECIPES
from moe.execution import REMOVED_EXPERTS


@pytest.mark.parametrize("name", RECIPES)
def test_config_round_trips(name):
    run = RunConfig(task="jsonl:a b.jsonl", steps=7, devices=3, log_to=("wandb", "tensorboard"))
    recipe = replace(RECIPES[name](), clip_high=0.3, kl_coef=0.1, top_k=5)
    stored = json.loads(json.dumps(to_json(run, recipe)))
    assert from_json(stored, "config.json") == (run, recipe)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", np.int64(3), "steps=np.int64(3) is not int"),
        ("steps", 1e3, "steps=1000.0 is not int"),
        ("learning_rate", np.float32(1), "learning_rate=np.float32(1.0) is not float"),
    ],
)
def test_to_json_refuses_unreadable_values(field, value, message):
    run, recipe = RunConfig(), RECIPES["grpo"]()
    # Past the constructor, which annotations may check.
    object.__setattr__(run if hasattr(run, field) else recipe, field, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        to_json(run, recipe)


def test_to_json_writes_numpy_floats():
    recipe = RECIPES["grpo"](learning_rate=np.float64(1e-4))
    assert json.loads(json.dumps(to_json(RunConfig(), recipe)))["hyperparameters"] == asdict(recipe)


def test_check_range_refuses_text():
    with pytest.raises(ValueError, match=r"rate='1e-4' must be a number\."):
        check_range(SimpleNamespace(rate="1e-4"), ("rate",), 0)


def test_from_json_fills_missing_fields_with_defaults():
    for name in ("chat_template_kwargs", "turn_length"):
        assert from_json(changed("run", **{name: "GONE"}), "config.json")[0] == RunConfig()
    inputs = changed("run", chat_template_kwargs='{"enable_thinking": false}')
    run, _ = from_json(inputs, "config.json")
    assert run.template_arguments == {"enable_thinking": False}
    with pytest.raises(ValueError, match="chat_template_kwargs='3' is not a JSON object"):
        from_json(changed("run", chat_template_kwargs="3"), "config.json")


def test_from_json_accepts_integers_for_floats():
    config = to_json(RunConfig(), RECIPES["grpo"]())
    config["hyperparameters"] |= {"temperature": 1, "kl_coef": 2}
    _, recipe = from_json(config, "config.json")
    assert (recipe.temperature, recipe.kl_coef) == (1.0, 2.0)
    assert type(recipe.temperature) is float and type(recipe.kl_coef) is float


def changed(part, **values):
    config = json.loads(json.dumps(to_json(RunConfig(), RECIPES["grpo"]())))
    if part:
        config[part] |= values
        config[part] = {name: value for name, value in config[part].items() if value != "GONE"}
    else:
        config |= values
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("run", colour="red"), "unknown run.colour"),
        (changed("", notes=""), "unknown notes"),
        (changed("", recipe="grop"), "recipe 'grop' is unknown: did you mean"),
        (changed("", recipe=["grpo"]), "recipe is .'grpo'., not the name of a recipe"),
        (changed("", run=3), "run is 3, not an object"),
        (
            changed("", recipe="ppo"),
            "unknown hyperparameters.scale_by_std",
        ),
        (changed("run", steps="7"), "run.steps is '7', not int"),
        (changed("run", steps=7.0), "run.steps is 7.0, not int"),
        (changed("run", steps=True), "run.steps is True, not int"),
        (changed("run", shuffle_rewards=0), "run.shuffle_rewards is 0, not bool"),
        (changed("run", devices="many"), r"run.devices is 'many', not int \| None"),
        (changed("run", log_to=["paper"]), "run.log_to is .'paper'., not"),
        (changed("run", log_to="wandb"), "run.log_to is 'wandb', not"),
        (changed("hyperparameters", temperature=None), "temperature is None, not float"),
        (changed("hyperparameters", temperature=False), "temperature is False, not float"),
        (changed("hyperparameters", aggregation="mean"), "is 'mean', not 'token-mean' | "),
        (changed("hyperparameters", mini_batch=7), "config.json: mini_batch=7 does not divide"),
        (changed("run", warm_start_accuracy=10**400), "run.warm_start_accuracy is 1000"),
    ],
)
def test_from_json_refuses_in_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        from_json(config, "run/config.json")
    assert str(error.value).startswith("run/config.json") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fits",
    [
        {"layout": "dp2"},
        {"rollout_layout": "tp2"},
        {"max_staleness": 1, "rollout_devices": 2},
        {"devices": 2},
        {"remat": "full"},
        {"remat": "full", "fsdp": True},
        {"buffer_factor": 1.5},
        {"expert_chunks": 2},
        {"scan_layers": True},
    ],
)
def test_check_resumable_allows_another_machine(fits):
    run, recipe = RunConfig(max_staleness=fits.get("max_staleness", 0)), RECIPES["grpo"]()
    check_resumable((run, recipe), (replace(run, **fits), replace(recipe, micro_batch=16)))


def test_check_resumable_keeps_scan_layers_of_a_saved_cache():
    run, recipe = RunConfig(max_staleness=2, stale_cache=True), RECIPES["grpo"]()
    with pytest.raises(ValueError, match=r"--scan-layers is None in the run, False was given"):
        check_resumable((run, recipe), (replace(run, scan_layers=False), recipe))


def test_check_resumable_allows_settings_without_effect_on_numbers():
    run, recipe = RunConfig(), RECIPES["grpo"]()
    check_resumable((run, recipe), (run, recipe))
    other = replace(
        run,
        steps=run.steps + 1,
        checkpoint_every=3,
        keep_checkpoints=5,
        samples_every=7,
        sample_tokens=9,
        max_nonfinite=11,
        drift_alarm=0.5,
        log_to=("tensorboard",),
    )
    check_resumable((run, recipe), (other, recipe))


def test_check_resumable_refuses_gradient_wire():
    run, recipe = RunConfig(), RECIPES["grpo"]()
    with pytest.raises(ValueError, match="--gradient-wire is float32 in the run, bfloat16 was"):
        check_resumable((run, recipe), (replace(run, gradient_wire="bfloat16"), recipe))


def test_check_resumable_names_changes_with_both_values():
    run, recipe = RunConfig(steps=150, eval_every=10), RECIPES["grpo"]()
    inputs = replace(run, steps=100, eval_every=3), replace(recipe, kl_coef=0.5)
    with pytest.raises(ValueError) as error:
        check_resumable((run, recipe), inputs)
    message = str(error.value)
    assert "--steps is 150 in the run and can only be raised, 100 was given; " in message
    assert "--eval-every is 10 in the run, 3 was given; " in message
    assert "--kl-coef is None in the run, 0.5 was given. Leave these flags out" in message


def test_from_json_without_answers_is_evaluated():
    assert RunConfig().answers == "final"
    assert from_json(changed("run", answers="GONE"), "config.json")[0].answers == "evaluated"


@pytest.mark.parametrize(("name", "other"), REMOVED_EXPERTS.items())
@unchecked()
def test_run_folder_with_removed_implementation_resumes_with_another(name, other):
    config = json.loads(json.dumps(to_json(RunConfig(), RECIPES["grpo"]())))
    config["run"]["experts"] = name
    run, recipe = from_json(config, "config.json")
    with pytest.raises(ValueError, match=rf"^experts='{name}' .*: give --experts {other}\.$"):
        check_resumable((run, recipe), (run, recipe))
    check_resumable((run, recipe), (replace(run, experts=other), recipe))
    config["run"]["experts"] = "tile"
    with pytest.raises(ValueError, match=r"run\.experts is 'tile', not"):
        from_json(config, "config.json")
