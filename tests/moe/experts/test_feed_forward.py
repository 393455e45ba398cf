"""Grouped experts against the plain twin, and the maps that group the rows against loops."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh
from references import dense_reference

from moe.architecture.feed_forward import ClampedSwiGLU
from moe.experts.feed_forward import dense, routed_experts
from moe.weights import Dense, Experts

NUM_EXPERTS, D_MODEL, D_EXPERT = 5, 6, 7
exactly = settings(max_examples=25, deadline=None, derandomize=True)


def expert_weights(num_experts=NUM_EXPERTS, seed=0):
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return np.asarray(draw.normal(size=shape) / shape[-2] ** 0.5, np.float32)

    return Experts(
        router=normal(D_MODEL, num_experts),
        gate_up=np.stack([normal(num_experts, D_MODEL, D_EXPERT) for _ in range(2)], axis=2),
        down=normal(num_experts, D_EXPERT, D_MODEL),
    )


def rows_of(num_rows, seed=1):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(num_rows, D_MODEL)).astype(np.float32)


def swiglu(weights, expert, row):
    """One row through one expert, in float64."""
    row, gate, up, down = (
        np.asarray(x, np.float64)
        for x in (row, *np.moveaxis(weights.gate_up[expert], 1, 0), weights.down[expert])
    )
    gated = row @ gate
    return (gated / (1 + np.exp(-gated)) * (row @ up)) @ down


@partial(jit, static_argnums=0)
def output_and_gradients(function, weights, rows, experts, probs):
    """What `function` gives, and the gradient of its product with an uneven pattern."""

    def inner(weights, rows, probs):
        out = function(weights, rows, experts, probs)
        pull = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * pull), out

    gradient = jax.value_and_grad(inner, argnums=(0, 1, 2), has_aux=True)
    (_, out), gradients = gradient(weights, rows, probs)
    return out, gradients


reference = jit(dense_reference)


def with_room(weights, rows, experts, probs):
    out, overflow = routed_experts(weights, rows, experts, probs)
    return out + jnp.where(overflow == 0, 0.0, jnp.nan)


def agree(weights, rows, experts, probs=None):
    experts = np.reshape(experts, (len(rows), -1)).astype(np.int32)
    probs = np.ones(experts.shape, np.float32) if probs is None else probs
    given = weights, rows, experts, probs
    out, gradients = jax.device_get(output_and_gradients(with_room, *given))
    twin, twin_gradients = jax.device_get(output_and_gradients(dense_reference, *given))
    # float32 sums of up to seven products, and of up to forty rows in the gradients.
    np.testing.assert_allclose(out, twin, atol=2e-6 * experts.shape[1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6),
        gradients,
        twin_gradients,
    )
    return out, gradients[:2]


def test_plain_twin_is_weighted_swiglu():
    weights, rows = expert_weights(), rows_of(4)
    ids = np.asarray([[4, 0], [5, 2], [2, 9], [3, 1]])
    probs = np.random.default_rng(3).random((4, 2)).astype(np.float32)
    out = np.asarray(reference(weights, rows, ids, probs))
    for row in range(4):
        expected = sum(
            prob * swiglu(weights, expert, rows[row])
            for expert, prob in zip(ids[row], probs[row], strict=True)
            if expert < NUM_EXPERTS
        )
        np.testing.assert_allclose(out[row], expected, atol=1e-6)


ASSIGNMENTS = {
    "uneven": [3, 0, 3, 3, 1, 3, 0, 3, 3, 3, 3],
    "all to one": [2] * 11,
    "all to the last": [4] * 11,
    "one each and none": [4, 3, 2, 1, 0, 5, 5, 5, 5, 5, 5],
    "nobody's": [5] * 11,
    "far past the end": [17, 2, 99, 0, 5, 6, 2, 2, 4, 4, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_grouped_experts_equal_the_plain_twin(name):
    ids = np.asarray(ASSIGNMENTS[name])
    out, (by_weights, by_rows) = agree(expert_weights(), rows_of(len(ids)), ids)
    nobodys = ids >= NUM_EXPERTS
    np.testing.assert_array_equal(out[nobodys], 0)
    np.testing.assert_array_equal(by_rows[nobodys], 0)
    for expert in set(range(NUM_EXPERTS)) - set(ASSIGNMENTS[name]):
        np.testing.assert_array_equal(by_weights.gate_up[expert], 0)
        np.testing.assert_array_equal(by_weights.down[expert], 0)


@pytest.mark.slow
@exactly
@given(st.sampled_from([1, 11, 43]), st.integers(0, 2**16), st.integers(0, NUM_EXPERTS))
def test_grouped_experts_equal_the_plain_twin_on_any_assignment(num_rows, seed, first):
    draw = np.random.default_rng(seed)
    ids = draw.integers(first, NUM_EXPERTS + 1, num_rows)
    agree(expert_weights(), rows_of(num_rows, seed), ids)


def choices_of(num_tokens, k):
    """Distinct experts of each token, some of them nobody's, and probs."""
    draw = np.random.default_rng(4)
    ids = np.stack([draw.permutation(NUM_EXPERTS + 1)[:k] for _ in range(num_tokens)])
    return ids.astype(np.int32), draw.normal(size=(num_tokens, k)).astype(np.float32)


@pytest.mark.slow
def test_the_experts_of_a_token_are_weighted_and_added_up():
    ids, probs = choices_of(11, 3)
    agree(expert_weights(), rows_of(11), ids, probs)


@pytest.mark.slow
def test_expert_overflow_is_counted_and_adds_nothing():
    weights, rows = expert_weights(), rows_of(11)
    ids, probs = choices_of(11, 3)
    known = int(np.sum(ids < NUM_EXPERTS))
    whole = reference(weights, rows, ids, probs)
    for num_rows in (known, known - 1, 7):
        out, overflow = jit(partial(routed_experts, num_rows=num_rows))(weights, rows, ids, probs)
        assert int(overflow) == known - num_rows
        # In the order of experts, and within one of tokens, the first ones find room.
        flat = ids.reshape(-1)
        kept = np.zeros(flat.shape, bool)
        kept[np.argsort(flat, kind="stable")[:num_rows]] = True
        fewer = reference(weights, rows, ids, probs * kept.reshape(ids.shape))
        np.testing.assert_allclose(out, fewer, atol=4e-6)
    assert not np.allclose(fewer, whole, atol=1e-2)


def test_the_second_product_is_nobodys_residual():
    """By tracing: what the backward pass is given has a first product and no second one."""
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), expert_weights())
    rows, (ids, probs) = rows_of(11).astype(jnp.bfloat16), choices_of(11, 3)
    sizes = []

    def loss(weights, rows, probs, ids):
        out, pull = jax.vjp(
            lambda *given: routed_experts(*given[:2], ids, given[2])[0], weights, rows, probs
        )
        sizes.extend((x.shape, x.dtype) for x in jax.tree.leaves(pull))
        return out

    jax.eval_shape(loss, weights, rows, probs, ids)
    kept = [shape for shape, dtype in sizes if dtype == jnp.bfloat16 and shape[:1] == (33,)]
    # The rows of both products and the result of the first.
    assert sorted(kept) == [(33, D_MODEL), (33, D_EXPERT), (33, 2 * D_EXPERT)]
    # The matrices as they are stored.
    assert not [shape for shape, _ in sizes if shape[-1:] == (2 * D_EXPERT,) and len(shape) == 3]
    assert (weights.gate_up.shape, weights.gate_up.dtype) in sizes


@pytest.mark.slow
def test_biases_are_of_each_rows_expert():
    """With experts that nobody chose, choices of none, and too little room."""
    draw = np.random.default_rng(5)
    weights = expert_weights()
    weights = replace(
        weights,
        gate_up_bias=np.float32(draw.normal(size=(*weights.gate_up.shape[::2], D_EXPERT))),
        down_bias=np.float32(draw.normal(size=weights.down.shape[::2])),
    )
    rows, (ids, probs) = rows_of(11), choices_of(11, 3)
    number = weights.down.shape[0]
    ids[ids == 1] = 2
    ids[4] = number
    activation = ClampedSwiGLU(1.5, 0.7)
    kept = np.zeros(ids.size, bool)
    kept[np.argsort(ids.reshape(-1), kind="stable")[:20]] = True
    kept = kept.reshape(ids.shape)

    def twin(weights, rows, ids, probs):
        return dense_reference(weights, rows, ids, jnp.where(kept, probs, 0.0), activation)

    def short(weights, rows, ids, probs):
        return routed_experts(weights, rows, ids, probs, num_rows=20, activation=activation)[0]

    (out, found), (whole, expected) = (
        output_and_gradients(f, weights, rows, ids, probs) for f in (short, twin)
    )
    np.testing.assert_allclose(out, whole, atol=6e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        found[:2],
        expected[:2],
    )


def test_an_unknown_implementation_is_refused():
    weights, rows = expert_weights(), rows_of(4)
    ids, probs = choices_of(4, 2)
    with pytest.raises(ValueError, match=r"experts='tile' is not known: .*, plain, or None"):
        jax.eval_shape(partial(routed_experts, implementation="tile"), weights, rows, ids, probs)


def test_dense_layer_is_swiglu_on_any_number_of_ranks():
    experts = expert_weights(1)
    # An even number of hidden units, split over two ranks.
    weights = Dense(experts.gate_up[0, :, :, :6], experts.down[0, :6])
    one = Experts(experts.router, weights.gate_up[None], weights.down[None])
    x = rows_of(4)
    mesh = mesh_of("tp2")
    spec = Dense(P(None, None, mesh.tp), P(mesh.tp))
    out = on_mesh(lambda w, x: dense(w, x, mesh), mesh, (spec, P(mesh.tp)), P(mesh.tp))(weights, x)
    out = np.asarray(out)
    for row in range(4):
        np.testing.assert_allclose(out[row], swiglu(one, 0, x[row]), atol=1e-6)
