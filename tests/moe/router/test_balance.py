"""What the balancing losses compare with on a mesh, and how the selection bias moves."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh

from moe.config import Model, ModelConfig
from moe.router.balance import load_fractions

ROUTE = 3
CONFIG = ModelConfig(vocab_size=5, num_experts=ROUTE, experts_per_token=1)


def test_shares_are_of_the_group_and_of_everyone():
    mesh = mesh_of("tp2 dp4 / ep2 etp2")
    config = replace(CONFIG, batch_balance_coef=1.0, global_balance_coef=1.0)
    load = np.random.default_rng(0).integers(0, 9, (4, 2, ROUTE)).astype(np.float32)
    own = np.zeros((8, ROUTE), np.float32)

    def local(load):
        compared = load_fractions(jnp.asarray(own[:1]), load[0], Model(config, mesh))
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
    compared = load_fractions(jnp.ones((1, ROUTE)), jnp.ones(ROUTE), Model(CONFIG, mesh))
    assert compared.batch is compared.everywhere is None
