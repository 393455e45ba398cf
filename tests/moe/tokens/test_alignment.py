"""Numbers computed at a position, moved to the token they speak about."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from tiers import full_but

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.placement import specs
from moe.tokens import packing

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    experts_per_token=3,
    d_expert=7,
    d_ff=3,
)
MESH = mesh_of("dp1")
TIME = 6


@partial(jit, static_argnums=0)
def hidden(config, weights, tokens, valid):
    """Hidden states ``[batch, time, d_model]``."""
    network = Model(config, MESH)
    step = jax.shard_map(
        lambda w, t, v: model.hidden(w, t, v, network)[0],
        mesh=MESH.mesh,
        in_specs=(specs(network), P(), P()),
        out_specs=P(MESH.axes),
    )
    return step(weights, tokens, valid).reshape(*tokens.shape, -1)


def one_sequence(seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, TIME).astype(np.int32)


@pytest.mark.slow
def test_values_speak_of_the_state_before_each_token():
    config = CONFIG.as_critic()
    network = Model(config, MESH)
    weights = random_weights(config, 1)
    tokens = np.stack([one_sequence(0), one_sequence(1)])
    valid = np.asarray([[True] * TIME, [False] * 2 + [True] * (TIME - 2)])
    values = np.asarray(
        on_mesh(
            lambda w, t, v: model.values(w, t, v, network)[0][None],
            MESH,
            (specs(network), P(), P()),
            P(MESH.except_sequence),
        )(weights, tokens, valid)
    )[0]
    states = np.asarray(hidden(config, weights, tokens, valid)) @ np.asarray(weights.head)
    np.testing.assert_array_equal(values[:, 0], 0)
    np.testing.assert_allclose(values[:, 1:], states[:, :-1], atol=5e-6)


@pytest.mark.parametrize(
    "layout", full_but(["dp1", "tp4", "tp2 dp2", "cp4", "cp2 tp2 dp2"], "dp1", "cp2 tp2 dp2")
)
@pytest.mark.parametrize("context", ["gather", "ulysses"])
def test_alignment_moves_each_number_to_its_token(layout, context):
    mesh, config = mesh_of(layout), replace(CONFIG, execution=Execution(context=context))
    network = Model(config, mesh)
    shape = (4, 2 * TIME)
    tokens = np.random.default_rng(0).integers(0, 9, shape).astype(np.int32)

    def local(tokens):
        after = packing.next_tokens(tokens, network).astype(jnp.float32)
        return packing.align_to_tokens(after, tokens.shape, network)[None]

    rows = tuple(axis for axis in mesh.except_sequence if axis not in mesh.dp)
    aligned = np.asarray(on_mesh(local, mesh, P(mesh.dp), P(rows, mesh.dp))(tokens))[0]
    # Position t - 1 is asked for the token that follows it, which is token t.
    np.testing.assert_array_equal(aligned[:, 1:], tokens[:, 1:])
    np.testing.assert_array_equal(aligned[:, 0], 0)
