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

from moe.experts.feed_forward import dense, every_expert, routed_experts
from moe.experts.permutation import (
    inverse_places,
    permute,
    positions_within,
    sort_by_group,
    take_rows,
)
from moe.weights import Dense, Experts

NUM_EXPERTS, D_MODEL, D_EXPERT = 5, 6, 7
exactly = settings(max_examples=25, deadline=None, derandomize=True)


def rows_in(last):
    """Ids up to `last`, of a few lengths so that little is compiled."""
    return st.sampled_from([1, 8, 43]).flatmap(
        lambda length: st.lists(st.integers(0, last), min_size=length, max_size=length)
    )


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
    twin, twin_gradients = output_and_gradients(every_expert, weights, rows, experts)
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
    out = every_expert(weights, rows, jnp.asarray(ids))
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


@exactly
@given(rows_in(7))
def test_positions_within_count_each_group(ids):
    position, count = positions_within(jnp.asarray(ids), NUM_EXPERTS)
    seen = [0] * NUM_EXPERTS
    for row, group in enumerate(ids):
        if group < NUM_EXPERTS:
            assert position[row] == seen[group]
            seen[group] += 1
    assert count.tolist() == seen


@exactly
@given(st.data())
def test_inverse_places_undo_places(data):
    num_places = data.draw(st.sampled_from([1, 4, 11]))
    # Places past the end stand for rows that have none.
    places = data.draw(st.permutations(range(num_places + 4)))[: data.draw(st.sampled_from([1, 4]))]
    rows = inverse_places(jnp.asarray(places), num_places).tolist()
    for place in range(num_places):
        assert rows[place] == (places.index(place) if place in places else len(places))


def test_take_rows_gives_zeros_past_the_end():
    x = jnp.arange(6.0).reshape(3, 2) + 1
    taken = take_rows(x, jnp.asarray([2, 3, 0, 99]))
    np.testing.assert_array_equal(taken, [[5, 6], [0, 0], [1, 2], [0, 0]])


@exactly
@given(rows_in(NUM_EXPERTS + 1))
def test_rows_are_sorted_by_group_and_keep_their_order_within(ids):
    order, sizes = sort_by_group(jnp.asarray(ids), NUM_EXPERTS)
    known = [row for group in range(NUM_EXPERTS) for row in range(len(ids)) if ids[row] == group]
    assert order.tolist()[: len(known)] == known
    assert sorted(order.tolist()) == list(range(len(ids)))
    assert sizes.tolist() == [ids.count(group) for group in range(NUM_EXPERTS)]


def test_more_pairs_of_group_and_row_than_integers_are_refused():
    with pytest.raises(ValueError, match=r"8388608 rows of 256 groups .* route fewer rows"):
        jax.eval_shape(lambda x: sort_by_group(x, 256), jax.ShapeDtypeStruct((2**23,), jnp.int32))


def test_permute_has_the_gradient_of_indexing():
    order = jnp.asarray([2, 0, 3, 1])
    x, pull = rows_of(4), rows_of(4, seed=2)
    out, back = jax.vjp(lambda x: permute(x, order, jnp.argsort(order)), x)
    np.testing.assert_array_equal(out, x[order])
    np.testing.assert_array_equal(back(pull)[0], jax.vjp(lambda x: x[order], x)[1](pull)[0])


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
