"""The supervised stage as a recipe: its sizes, its steps and its learning rate."""

import numpy as np
import pytest

from jrl.config.flags import check_idle, default_run, drop_idle, idle_fields
from jrl.config.run import RunConfig
from jrl.recipes import Grpo, Sft
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.load import load_recipe, reference_of


def test_sizes_and_steps():
    recipe = Sft(batch=12, epochs=3)
    assert load_recipe("sft") is Sft and reference_of(recipe) == recipe.name == "sft"
    assert (recipe.completions, recipe.mini_batch_size, recipe.micro_batch_size) == (12, 12, 12)
    assert recipe.divided(8) == recipe and Sft(batch=640).micro_batch_size == 64
    assert [recipe.steps_of(n) for n in (4, 5, 12)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"batch": 6, "micro_batch": 4}, "micro_batch=4 does not divide batch=6"),
        ({"max_length": 1}, "max_length=1 leaves no token"),
        ({"learning_rate_final": 1.5}, r"learning_rate_final=1\.5 must lie in 0\.\.1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Sft(**settings)


def test_learning_rates_fall_to_the_last_step():
    """Two steps of warm-up, then four down to a quarter."""

    def rates(schedule):
        optimizer = Optimizer(0.8, warmup=2, schedule=schedule, steps=6, final=0.25)
        return [float(optimizer.rate_at(count)) for count in range(8)]

    np.testing.assert_allclose(
        rates("linear"), [0.4, 0.8, 0.8, 0.65, 0.5, 0.35, 0.2, 0.2], rtol=1e-6
    )
    part = (1 - np.cos(np.pi * np.array([0, 0.25, 0.5, 0.75, 1, 1]))) / 2
    expected = [0.4, 0.8, *(0.8 * (1 - 0.75 * part))]
    np.testing.assert_allclose(rates("cosine"), expected, rtol=1e-6)


def test_what_changes_nothing_is_refused_and_not_written():
    run, recipe = default_run(Sft), Sft()
    assert (run.steps, run.warm_start_steps) == (0, 0) and default_run(Grpo) == RunConfig()
    check_idle(run, recipe)
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 changes nothing in sft: leave it out"):
        check_idle(run, Sft(kl_coef=0.1))
    with pytest.raises(ValueError, match="warm_start_steps=5 changes nothing in sft"):
        check_idle(RunConfig(warm_start_steps=5), recipe)
    check_idle(RunConfig(warm_start_steps=5), Grpo(kl_coef=0.1))
    config = {"recipe": "sft", "run": {"seed": 1, "slots": None}, "hyperparameters": {"top_k": 5}}
    kept = {"recipe": "sft", "run": {"seed": 1}, "hyperparameters": {}}
    assert drop_idle(config, Sft) == kept and drop_idle(config, Grpo) == config
    assert {"kl_coef", "warm_start_steps", "slots", "rollout_split"} <= idle_fields(Sft)
    assert not {"steps", "learning_rate", "micro_batch", "drop_policy"} & idle_fields(Sft)
