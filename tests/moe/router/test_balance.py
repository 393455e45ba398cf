"""What the balancing losses compare with on a mesh, and how the selection bias moves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh

from moe.config import ModelConfig
from moe.router.balance import shares
from moe.router.bias import moved_bias, rebalanced
from moe.weights import initialise

ROUTE = 3
CONFIG = ModelConfig(vocab_size=5, num_experts=ROUTE, experts_per_token=1)


def test_shares_are_of_the_group_and_of_everyone():
    mesh = mesh_of("tp2 dp4 / ep2 etp2")
    config = replace(CONFIG, batch_balance_coef=1.0, global_balance_coef=1.0)
    load = np.random.default_rng(0).integers(0, 9, (4, 2, ROUTE)).astype(np.float32)
    own = np.zeros((8, ROUTE), np.float32)

    def local(load):
        compared = shares(jnp.asarray(own[:1]), load[0], config, mesh)
        return compared.batch[None], compared.everywhere[None]

    tokens = P((*mesh.dp, *mesh.tp))
    batch, everywhere = on_mesh(
        local,
        mesh,
        (tokens,),
        (P(mesh.dp), P()),
    )(jnp.asarray(load.reshape(8, ROUTE)))
    of_group = load.sum(axis=1)
    np.testing.assert_allclose(batch, of_group / of_group.sum(axis=1, keepdims=True), rtol=1e-6)
    total = load.sum(axis=(0, 1))
    np.testing.assert_allclose(everywhere[0], total / total.sum(), rtol=1e-6)


def test_losses_without_a_weight_compare_with_nothing():
    mesh = mesh_of("dp1")
    compared = shares(jnp.ones((1, ROUTE)), jnp.ones(ROUTE), CONFIG, mesh)
    assert compared.batch is compared.everywhere is None


def test_bias_moves_by_the_sign_of_what_is_missing():
    bias = jnp.asarray([[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]])
    load = jnp.asarray([[9.0, 1.0, 5.0], [4.0, 4.0, 4.0]])
    moved = moved_bias(bias, load, 0.25)
    np.testing.assert_allclose(moved, [[0.25, 0.25, -0.5], [0.0, 0.0, 0.0]], rtol=1e-7)


def test_no_bias_to_move_is_an_error():
    weights = initialise(replace(CONFIG, num_layers=1), jax.random.key(0))
    with pytest.raises(ValueError, match="selection_bias=False has no bias to move"):
        rebalanced(weights, weights, jnp.ones((1, ROUTE)), 1e-3)
