"""Rows looked up in a table that is sharded over ``tp``, against a plain look-up."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from tiers import full_but

from moe.config import Model, ModelConfig
from moe.model import embed, lookup
from moe.placement import specs
from sharding.collectives import all_sum

TOKENS, D_MODEL = 24, 10
CONFIG = ModelConfig(
    vocab_size=36,
    num_layers=2,
    d_model=D_MODEL,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=0,
    d_ff=12,
    embedding_scale=1.7,
)
COLLECTIVE = r" (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("


def given(vocab_size):
    """Tokens of which some come often and the first and the last row do, and what a loss makes of
    their states."""
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, vocab_size, TOKENS)
    tokens[:5] = 0, vocab_size - 1, vocab_size - 1, vocab_size // 2, vocab_size // 2 - 1
    return tokens.astype(np.int32), draw.normal(size=(TOKENS, D_MODEL)).astype(np.float32)


@functools.cache
def program(config, layout):
    """States of all tokens, and the gradient of a loss of them with respect to the weights."""
    mesh = mesh_of(layout)

    model = Model(config, mesh)

    def local(weights, tokens, of_states):
        def loss(weights):
            x = embed(weights, tokens, model)
            own = jnp.sum(x.astype(jnp.float32) * of_states)
            # Rows and stages hold the same tokens, which count once.
            copies = mesh.layout.dp * mesh.layout.pp
            return all_sum(own, mesh.axes) / copies, x

        (_, x), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        # Typed as varying over axes that it does not depend on.
        others = tuple(axis for axis in mesh.axes if axis not in mesh.sequence)
        return jax.lax.pmax(x, others), grads

    spec, by_token = specs(model), P(mesh.sequence)
    return on_mesh(local, mesh, (spec, P(), by_token), (by_token, spec))


CASES = [
    ("dp1", 36),
    ("tp2", 36),
    ("tp4", 36),
    ("tp4 cp2", 36),
    ("dp2 tp2 pp2", 36),
    ("tp2 cp2 dp2 / ep4", 36),
    # Rows that tp does not divide are whole on each rank.
    ("tp2", 37),
    ("tp4 cp2", 37),
    # One row for each rank.
    ("tp4", 4),
]


@pytest.mark.parametrize("dtype", full_but(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize(("layout", "vocab_size"), full_but(CASES, CASES[0], CASES[3], CASES[7]))
def test_equals_a_plain_look_up(layout, vocab_size, dtype):
    config = replace(CONFIG, vocab_size=vocab_size, dtype=dtype)
    weights, (tokens, of_states) = random_weights(config, 0), given(vocab_size)
    x, grads = jax.device_get(program(config, layout)(weights, tokens, of_states))
    assert x.dtype == dtype
    # A row and zeros: not a bit differs, in half precision neither.
    expected = (weights.embedding[tokens] * np.float32(1.7)).astype(dtype)
    np.testing.assert_array_equal(x.astype(np.float32), expected.astype(np.float32))
    rounded = np.asarray(of_states.astype(dtype), np.float64)
    of_rows = np.zeros((vocab_size, D_MODEL))
    np.add.at(of_rows, tokens, 1.7 * rounded)
    # float32 sums of a few terms.
    np.testing.assert_allclose(grads.embedding, of_rows, rtol=1e-5, atol=1e-6)


def test_collectives_are_those_claimed():
    """Forward a reduce-scatter of a device's tokens, backward a gather; of whole rows neither."""
    tokens, of_states = given(36)
    for vocab_size, per_call in ((36, {"reduce-scatter": 1, "all-gather": 1}), (37, {})):
        config = replace(CONFIG, vocab_size=vocab_size)
        lowered = program(config, "tp4").lower(random_weights(config, 0), tokens, of_states)
        counts = Counter(re.findall(COLLECTIVE, lowered.compile().as_text()))
        # A sum of the loss or of the gradient.
        del counts["all-reduce"]
        assert counts == per_call


def test_embedding_has_the_variance_of_one():
    config = replace(CONFIG, vocab_size=2000, embedding_scale=None)
    mesh = mesh_of("dp1")
    model = Model(config, mesh)
    states = on_mesh(
        lambda weights, tokens: embed(weights, tokens, model),
        mesh,
        (specs(model), P()),
        P(mesh.axes),
    )(random_weights(config, 1), np.arange(2000, dtype=np.int32))
    # 20 000 values: a standard error of 1 %.
    assert abs(np.var(states) - 1) < 0.05


@jit
def looked_up(table, tokens, factors):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    local = jax.shard_map(
        lambda table: jnp.sum(lookup(table, tokens) * factors),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
    )
    return jax.value_and_grad(local)(table)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_the_gradient_of_a_frequent_one(dtype):
    """A row that 400 tokens have: in bfloat16, 256 and 1 are 256."""
    table = (np.arange(15).reshape(5, 3) / 7).astype(dtype)
    tokens = np.asarray([3] * 400 + [0, 4, 4, 5], np.int32)  # the last is past the end
    factors = np.ones((404, 3), np.float32)
    value, gradient = jax.device_get(looked_up(table, tokens, factors))
    exact = table.astype(np.float32)
    expected = 400.0 * exact[3].sum() + exact[0].sum() + 2 * exact[4].sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # a float32 sum of 1209 terms
    assert gradient.dtype == dtype
    counts = np.array([1, 0, 0, 400, 2], np.float32)[:, None]
    np.testing.assert_array_equal(gradient.astype(np.float32), np.broadcast_to(counts, (5, 3)))
