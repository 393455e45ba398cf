from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from small_runs import fresh_state, fresh_weights, small_run, small_setup

from jrl.config.run import RunConfig
from jrl.losses import EntropyStatistics
from jrl.recipes import Hapo, Ppo
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.state import abstract, init_state, init_weights
from moe.config import Model

SPREAD = RunConfig(layout="tp2 dp2 / ep4")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [replace(Ppo(), kl_coef=0.1), Hapo()], ids=lambda r: r.name)
@pytest.mark.parametrize(
    "run",
    [
        RunConfig(),
        SPREAD,
        replace(SPREAD, dtype="bfloat16", mu_dtype="bfloat16"),
        RunConfig(layout="dp4", dtype="bfloat16", remat="full", fsdp=True),
        RunConfig(layout="pp3 dp2", dtype="bfloat16"),
    ],
    ids=lambda run: f"{run.layout} {run.dtype}",
)
def test_a_checkpoint_is_read_into_the_place_that_the_state_has(run, recipe):
    setup = build_setup(run, recipe)
    weights = init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    neutral = {"entropy_statistics": EntropyStatistics.neutral()}
    chex.assert_trees_all_equal(state.algorithm, neutral if recipe.name == "hapo" else {})
    wanted = jax.tree.leaves_with_path(state)
    found = jax.tree.leaves_with_path(abstract(setup.networks))
    for (name, real), (other, like) in zip(wanted, found, strict=True):
        assert name == other and real.shape == like.shape and real.dtype == like.dtype
        assert real.sharding.is_equivalent_to(like.sharding, real.ndim), jax.tree_util.keystr(name)


def test_states_of_a_network_are_made_by_one_program_each(caplog):
    first, second = (small_setup(run=small_run(seed=seed)) for seed in (0, 1))
    one = fresh_state(first, fresh_weights(first)).policy
    with jax.log_compiles():
        other = fresh_state(second, fresh_weights(second)).policy
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert not np.array_equal(one.weights.embedding, other.weights.embedding)
