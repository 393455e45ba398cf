from dataclasses import replace

import jax
import pytest
from tiers import full_but

from jrl.config.run import RunConfig
from jrl.recipes import Ppo
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.state import abstract, init_state, init_weights


@pytest.mark.parametrize("layout", full_but(["dp1", "tp2 dp2 / ep4"], "tp2 dp2 / ep4"))
def test_a_checkpoint_is_read_into_the_place_that_the_state_has(layout):
    setup = build_setup(RunConfig(layout=layout), replace(Ppo(), kl_coef=0.1))
    weights = init_weights(setup.model, setup.mesh, setup.randomness.key("weights"))
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    wanted = jax.tree.leaves_with_path(state)
    found = jax.tree.leaves_with_path(abstract(setup.networks))
    for (name, real), (other, like) in zip(wanted, found, strict=True):
        assert name == other and real.shape == like.shape and real.dtype == like.dtype
        assert real.sharding.is_equivalent_to(like.sharding, real.ndim), jax.tree_util.keystr(name)
