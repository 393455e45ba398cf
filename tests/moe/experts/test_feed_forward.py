"""Grouped experts against the plain twin, and the maps that group the rows against loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh

from moe.experts.feed_forward import dense, dense_reference, routed_experts
from moe.weights import Dense, Experts

NUM_EXPERTS, D_MODEL, D_EXPERT = 5, 6, 7
exactly = settings(max_examples=25, deadline=None, derandomize=True)


def expert_weights(num_experts=NUM_EXPERTS, seed=0):
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    return Experts(
        router=normal(D_MODEL, num_experts),
        gate=normal(num_experts, D_MODEL, D_EXPERT),
        up=normal(num_experts, D_MODEL, D_EXPERT),
        down=normal(num_experts, D_EXPERT, D_MODEL),
    )


def rows_of(num_rows, seed=1):
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.normal(size=(num_rows, D_MODEL)), jnp.float32)


def swiglu(weights, expert, row):
    """One row through one expert, in float64."""
    row, gate, up, down = (
        np.asarray(x, np.float64)
        for x in (row, weights.gate[expert], weights.up[expert], weights.down[expert])
    )
    gated = row @ gate
    return (gated / (1 + np.exp(-gated)) * (row @ up)) @ down


@partial(jit, static_argnums=0)
def output_and_gradients(function, weights, rows, experts):
    """What `function` gives, and the gradient of its product with an uneven pattern."""

    def inner(weights, rows):
        out = function(weights, rows, experts)
        pull = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * pull), out

    (_, out), gradients = jax.value_and_grad(inner, argnums=(0, 1), has_aux=True)(weights, rows)
    return out, gradients


def agree(weights, rows, experts):
    out, gradients = output_and_gradients(routed_experts, weights, rows, experts)
    twin, twin_gradients = output_and_gradients(dense_reference, weights, rows, experts)
    # float32 sums of up to seven products, and of up to forty rows in the gradients.
    np.testing.assert_allclose(out, twin, atol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6),
        gradients,
        twin_gradients,
    )
    return out, gradients


def test_plain_twin_is_swiglu():
    weights, rows = expert_weights(), rows_of(7)
    ids = [4, 0, 5, 2, 2, 9, 3]
    out = dense_reference(weights, rows, jnp.asarray(ids))
    for row, expert in enumerate(ids):
        expected = swiglu(weights, expert, rows[row]) if expert < NUM_EXPERTS else np.zeros(D_MODEL)
        np.testing.assert_allclose(out[row], expected, atol=1e-6)


ASSIGNMENTS = {
    "uneven": [3, 0, 3, 3, 1, 3, 0, 3, 3, 3, 3],
    "all to one": [2] * 11,
    "all to the last": [4] * 11,
    "one each and none": [4, 3, 2, 1, 0, 5, 5, 5, 5, 5, 5],
    "nobody's": [5] * 11,
    "far past the end": [17, 2, 99, 0, 5, 6, 2, 2, 4, 4, 1],
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_grouped_experts_equal_the_plain_twin(name):
    ids = jnp.asarray(ASSIGNMENTS[name])
    out, (by_weights, by_rows) = agree(expert_weights(), rows_of(len(ids)), ids)
    nobodys = np.asarray(ids) >= NUM_EXPERTS
    np.testing.assert_array_equal(np.asarray(out)[nobodys], 0)
    np.testing.assert_array_equal(np.asarray(by_rows)[nobodys], 0)
    for expert in set(range(NUM_EXPERTS)) - set(ASSIGNMENTS[name]):
        np.testing.assert_array_equal(by_weights.gate[expert], 0)
        np.testing.assert_array_equal(by_weights.down[expert], 0)


@exactly
@given(st.sampled_from([1, 8, 43]), st.integers(0, 2**16), st.integers(0, NUM_EXPERTS))
def test_grouped_experts_equal_the_plain_twin_on_any_assignment(num_rows, seed, first):
    draw = np.random.default_rng(seed)
    ids = draw.integers(first, NUM_EXPERTS + 1, num_rows)
    agree(expert_weights(), rows_of(num_rows, seed), jnp.asarray(ids))


def test_dense_layer_is_swiglu_on_any_number_of_ranks():
    experts = expert_weights(1)
    # An even number of hidden units, split over two ranks.
    weights = Dense(experts.gate[0, :, :6], experts.up[0, :, :6], experts.down[0, :6])
    one = Experts(experts.router, weights.gate[None], weights.up[None], weights.down[None])
    x = rows_of(4)
    mesh = mesh_of("tp2")
    spec = Dense(P(None, mesh.tp), P(None, mesh.tp), P(mesh.tp))
    out = on_mesh(lambda w, x: dense(w, x, mesh), mesh, (spec, P(mesh.tp)), P(mesh.tp))(weights, x)
    for row in range(4):
        np.testing.assert_allclose(out[row], swiglu(one, 0, x[row]), atol=1e-6)
