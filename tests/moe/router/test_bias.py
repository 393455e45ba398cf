"""The selection bias moves towards idle experts."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit, random_weights

from moe.config import ModelConfig
from moe.placement import in_chunks, in_layer_order
from moe.router.balance import updated_bias, with_updated_bias
from sharding.folding import Layout, fold_abstract

ROUTE = 3
CONFIG = ModelConfig(vocab_size=5, num_experts=ROUTE, experts_per_token=1)


def test_updated_bias_moves_by_sign_of_missing_load():
    bias = np.float32([[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]])
    load = np.float32([[9.0, 1.0, 5.0], [4.0, 4.0, 4.0]])
    moved = updated_bias(jnp.asarray(bias), jnp.asarray(load), 0.25)
    np.testing.assert_allclose(moved, [[0.25, 0.25, -0.5], [0.0, 0.0, 0.0]], rtol=1e-7)


def test_no_bias_to_move_is_an_error():
    weights = random_weights(replace(CONFIG, num_layers=1), 0)
    with pytest.raises(ValueError, match="selection_bias=False has no bias to update"):
        with_updated_bias(weights, weights, jnp.ones((1, ROUTE)), 1e-3, fold_abstract(Layout()))


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2), Layout(pp=3)])
def test_the_bias_of_chunks_is_that_of_their_layers(layout):
    """Loads come in the order of the layers, weights as the stages of a pipeline store them."""
    config = replace(CONFIG, num_layers=4, selection_bias=True)
    mesh = fold_abstract(layout)
    load = np.random.default_rng(0).integers(0, 9, (4, ROUTE)).astype(np.float32)
    weights = random_weights(config, 0)

    @jit
    def both(weights, load):
        stored = in_chunks(weights, mesh)
        moved = with_updated_bias(stored, stored, load, 1e-3, mesh)
        plain = with_updated_bias(weights, weights, load, 1e-3, fold_abstract(Layout()))
        return in_layer_order(moved, mesh, num_layers=4), plain

    found, expected = both(weights, load)
    chex.assert_trees_all_equal(found, expected)


def test_experts_with_the_mean_load_stay():
    """Of any number: a seventh is no number of float32, and a sum of sevenths not the whole."""
    for number in (3, 5, 6, 7, 11):
        load = np.arange(1, 200, dtype=np.float32)[:, None] * np.ones(number, np.float32)
        moved = jax.jit(partial(updated_bias, rate=1e-3))(np.zeros_like(load), load)
        assert not np.any(moved), number
