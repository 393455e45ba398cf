"""The network on a folded mesh equals the network on one device: values, gradients, router sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe import model
from moe.config import ModelConfig
from moe.weights import initialise, specs
from sharding.collectives import all_sum
from sharding.folding import Layout, fold

# A distinct size for each axis, divisible where the layouts cut it.
MOE = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=20,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=8,
    experts_per_token=3,
    d_expert=14,
)
CONFIGS = {
    "routed": MOE,
    "shared": ModelConfig(**{**MOE.__dict__, "d_ff": 12, "head": "untied"}),
    "dense": ModelConfig(**{**MOE.__dict__, "num_experts": 0, "d_ff": 28}),
    "critic": ModelConfig(**{**MOE.__dict__, "head": "value"}),
}
LAYOUTS = [
    "dp8",
    "tp2",
    "tp4",
    "tp2 dp4",
    "dp4 / ep2",
    "dp8 / ep8",
    "tp2 / ep2",
    "tp4 / ep4",
    "tp2 dp4 / ep8",
    "tp4 dp2 / ep2",
    "tp2 dp4 / ep4",
]


def batch():
    tokens = jax.random.randint(jax.random.key(1), (16, 10), 0, MOE.vocab_size)
    length = jnp.arange(16) % 9 + 2
    valid = jnp.arange(10)[None, :] >= 10 - length[:, None]
    return tokens, valid


def loss(weights, tokens, valid, config, mesh):
    """A scalar that every weight reaches: sums over tokens, plus the router's losses."""
    num_tokens = all_sum(jnp.sum(valid.astype(jnp.int32)), mesh.dp)
    if config.head == "value":
        out, stats = model.values(weights, tokens, valid, config, mesh)
        per_token = jnp.square(out - 1.0)
    else:
        logits, stats = model.next_token_logits(weights, tokens, valid, config, mesh)
        after = jnp.take_along_axis(
            jax.nn.log_softmax(logits), model.next_tokens(tokens, mesh)[:, None], axis=1
        )[:, 0]
        per_token = -model.align_to_tokens(after, tokens.shape, mesh)
    # A padded first token carries nothing.
    counted = valid & (jnp.arange(tokens.shape[1]) > 0)[None, :]
    own = jnp.sum(per_token, where=counted) / num_tokens.astype(jnp.float32)
    total = all_sum(own + model.router_loss(stats, config, mesh, num_tokens), mesh.except_tp)
    return total, None if stats is None else all_sum(stats, mesh.axes)


def run(config, layout):
    mesh = fold(Layout.parse(layout), jax.devices()[: Layout.parse(layout).num_devices])
    spec = specs(config, mesh)
    step = jax.shard_map(
        lambda weights, tokens, valid: jax.value_and_grad(loss, has_aux=True)(
            weights, tokens, valid, config, mesh
        ),
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.dp), P(mesh.dp)),
        out_specs=((P(), P()), spec),
    )
    weights = initialise(config, jax.random.key(0))
    if config.head == "value":  # starts at zero, which would stop every gradient below it
        weights = weights.replace(head=jnp.linspace(-1.0, 1.0, config.d_model))
    return jax.jit(step)(weights, *batch())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_one_device(name, layout):
    (value, load), grads = run(CONFIGS[name], layout)
    (expected, expected_load), expected_grads = run(CONFIGS[name], "dp1")
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), grads, expected_grads
    )
    if load is not None:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), load, expected_load)
        np.testing.assert_array_equal(load.load, expected_load.load)
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in jax.tree.leaves(grads))
