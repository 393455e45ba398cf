"""The papers' tables, what a recipe refuses, and the rewards it makes of scores."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from annotations import unchecked

from jrl.recipes import (
    RECIPES,
    Dapo,
    GroupRelative,
    Grpo,
    Hapo,
    Ppo,
    ReinforcePlusPlus,
    Vapo,
)

COMMON = {"temperature": 1.0, "top_p": None, "top_k": None, "epochs": 1, "entropy_coef": None}
TABLES = {
    # 512 prompts x 16, mini-batches of 512, AdamW 1e-6 after 20 rollouts of warm-up, decay 0.1.
    Dapo: {
        **COMMON,
        "prompts": 512,
        "group_size": 16,
        "completions": 8192,
        "mini_batch": 512,
        "learning_rate": 1e-6,
        "learning_rate_warmup": 320,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "clip_dual": None,
        "kl_coef": None,
        "aggregation": "token-mean",
        "reward_correct": 1.0,
        "reward_wrong": -1.0,
        "overlong_buffer": 4096,
        "dynamic_sampling": True,
        "max_generation_rounds": 10,
    },
    # The paper's four components; sizes, quantile and strengths of the released scripts.
    Hapo: {
        **COMMON,
        "prompts": 512,
        "group_size": 16,
        "mini_batch": 512,
        "learning_rate": 1e-6,
        "learning_rate_warmup": 160,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": None,
        "aggregation": "token-mean",
        "reward_correct": 1.0,
        "reward_wrong": -1.0,
        "overlong_buffer": 4096,
        "dynamic_sampling": True,
        "max_generation_rounds": 16,
        "adaptive_temperature": True,
        "token_level_group_average": True,
        "differential_redistribution": True,
        "asymmetric_clipping": True,
        "entropy_quantile": 0.8,
        "tau": 0.1,
        "temperature_signal": "standardized",
        "redistribution_strength": 1.0,
        "clip_strength": 1.0,
        "group_average_fallback": None,
    },
    Vapo: {
        **COMMON,
        "prompts": 512,
        "group_size": 16,
        "completions": 8192,
        "mini_batch": 512,
        "learning_rate": 1e-6,
        "critic_learning_rate": 2e-6,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": None,
        "aggregation": "token-mean",
        "gamma": 1.0,
        "pretrain_critic": 50,
        "lam_critic": 1.0,
        "lam_alpha": 0.05,
        "positive_coef": 0.1,
    },
    # The baseline that the VAPO paper compares itself with: as many responses, one per prompt.
    Ppo: {
        **COMMON,
        "completions": 8192,
        "group_size": 1,
        "mini_batch": 512,
        "learning_rate": 1e-6,
        "critic_learning_rate": 2e-6,
        "gamma": 1.0,
        "lam": 0.95,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": None,
        "kl_reward_coef": None,
        "aggregation": "seq-mean-token-mean",
    },
    Grpo: {
        **COMMON,
        "group_size": 64,
        "completions": 1024,
        "mini_batch": 1024,
        "learning_rate": 1e-6,
        "kl_coef": 0.04,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "scale_by_std": True,
        "aggregation": "seq-mean-token-mean",
    },
}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__.lower())
def test_paper(kind):
    recipe = kind.paper()
    assert {name: getattr(recipe, name) for name in TABLES[kind]} == TABLES[kind]
    assert recipe.micro_batch_size == recipe.mini_batch


def test_names():
    assert {name: RECIPES[name]().name for name in RECIPES} == {name: name for name in RECIPES}


@pytest.mark.parametrize("kind", RECIPES.values())
def test_batch_arithmetic_is_checked(kind):
    with pytest.raises(ValueError, match=r"mini_batch=5 does not divide .* 6 x 2 = 12 completions"):
        kind(prompts=6, group_size=2, mini_batch=5)
    with pytest.raises(
        ValueError, match="micro_batch=4 does not divide mini_batch=6: choose a div"
    ):
        kind(prompts=6, group_size=2, mini_batch=6, micro_batch=4)
    for name in ("prompts", "group_size", "mini_batch", "micro_batch", "epochs"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            kind(**{name: 0})


@unchecked()
def test_choices_of_experts_are_replayed_from_one_of_two_places():
    unknown: Any = "R1"
    with pytest.raises(ValueError, match=r"router_replay='R1' is neither R2 .* nor R3"):
        Grpo(router_replay=unknown)
    assert all(kind().router_replay is None for kind in RECIPES.values())


def test_micro_batch_is_a_bound():
    recipe = Grpo(prompts=6, group_size=2, mini_batch=6, micro_batch=100)
    assert recipe.micro_batch_size == 6
    assert dataclasses.replace(recipe, micro_batch=None).micro_batch_size == 6
    assert dataclasses.replace(recipe, micro_batch=None).mini_batch_size == 6
    assert dataclasses.replace(recipe, micro_batch=3).micro_batch_size == 3


@pytest.mark.parametrize("kind", [k for k in RECIPES.values() if issubclass(k, GroupRelative)])
def test_groups_of_one_have_nothing_to_compare_with(kind):
    with pytest.raises(ValueError, match="group_size=1 leaves nothing to compare"):
        kind(prompts=256, group_size=1)


@pytest.mark.parametrize("kind", RECIPES.values())
def test_dynamic_sampling_needs_a_round_and_groups(kind):
    with pytest.raises(ValueError, match="max_generation_rounds=0 must be at least 1"):
        kind(max_generation_rounds=0)
    with pytest.raises(ValueError, match=r"group_size=1 leaves nothing to compare"):
        kind(prompts=512, group_size=1, dynamic_sampling=True)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Grpo(), [0.0, 0.25, 1.0]),
        (Ppo(), [0.0, 0.25, 1.0]),
        (Vapo(), [-1.0, -0.5, 1.0]),
        (Vapo(reward_wrong=0.0), [0.0, 0.25, 1.0]),
        (Grpo(reward_correct=3.0, reward_wrong=1.0), [1.0, 1.5, 3.0]),
    ],
)
def test_rewards(recipe, expected):
    scores = jnp.array([0.0, 0.25, 1.0])
    rewards = recipe.rewards(scores, jnp.array([20, 20, 20]), 20)
    np.testing.assert_array_equal(rewards, expected)


@pytest.mark.parametrize(("given", "buffer"), [(None, 4), (7, 7), (0, 0)])
def test_dapo_punishes_length_in_tokens(given, buffer):
    """By default a fifth of the limit, the share of the paper (4096 of 20480)."""
    lengths = np.array([1, 12, 13, 14, 16, 17, 18, 19, 20])
    scores = np.resize([1.0, 0.0], lengths.shape).astype(np.float32)
    rewards = Dapo(overlong_buffer=given).rewards(jnp.asarray(scores), jnp.asarray(lengths), 20)
    penalties = [oracles.overlong_penalty(length, 20, buffer) for length in lengths]
    np.testing.assert_allclose(rewards, 2 * scores - 1 + penalties, rtol=1e-6)  # float32


def test_dapo_paper_rewards():
    lengths = jnp.array([16384, 17408, 18432, 20480])
    rewards = Dapo.paper().rewards(jnp.ones(4), lengths, 20480)
    np.testing.assert_array_equal(rewards, [1.0, 0.75, 0.5, 0.0])


def test_which_recipes_use_what():
    assert [name for name in RECIPES if RECIPES[name]().uses_critic] == ["ppo", "vapo", "tppo"]
    assert [name for name in RECIPES if RECIPES[name]().dynamic_sampling] == ["dapo", "hapo"]
    adaptive = [name for name in RECIPES if RECIPES[name]().temperature_rule is not None]
    assert adaptive == ["hapo"]
    assert not any(kind().uses_reference for kind in RECIPES.values())
    assert all(kind(kl_coef=0.0).uses_reference for kind in RECIPES.values())
    assert Ppo(kl_reward_coef=0.0).uses_reference
    assert ReinforcePlusPlus(kl_reward_coef=0.0).uses_reference
    steps = {name: kind().value_pretraining_steps for name, kind in RECIPES.items()}
    assert {name: n for name, n in steps.items() if n} == {"vapo": 20, "tppo": 20}
    assert Ppo(pretrain_critic=3).value_pretraining_steps == 3


@pytest.mark.parametrize("kind", RECIPES.values())
def test_the_defaults_are_four_updates_in_two_pieces(kind):
    recipe = kind()
    assert (recipe.completions, recipe.mini_batch_size, recipe.micro_batch_size) == (512, 128, 64)


@pytest.mark.parametrize(
    ("prompts", "group_size", "rows", "micro_batch"),
    [
        (10, 8, 80, 80),  # 80 is nearer to 64 than 40 is
        (12, 8, 96, 48),
        (1, 2, 2, 2),
        (131, 8, 131, 131),  # a prime: micro-batches of 1 or of 131
        (66, 8, 132, 66),
        (512, 16, 128, 64),
    ],
)
def test_sizes_that_follow_from_others_divide(prompts, group_size, rows, micro_batch):
    recipe = Grpo(prompts=prompts, group_size=group_size)
    assert (recipe.mini_batch_size, recipe.micro_batch_size) == (rows, micro_batch)
    assert (
        Grpo(prompts=prompts, group_size=group_size, mini_batch=rows).micro_batch_size
        == micro_batch
    )


def test_a_mini_batch_that_nobody_chose_divides_over_devices():
    recipe = Grpo(prompts=64, group_size=6)
    assert recipe.divided(1).mini_batch == 128
    assert recipe.divided(3).mini_batch == 96  # 384 / 4; 192 is further in ratio
    assert recipe.divided(7).mini_batch == 128  # none does: refused with the layout
    own = dataclasses.replace(recipe, mini_batch=64)
    assert own.divided(3) is own
