"""A forward and a backward pass with arrays in between are the gradient that JAX takes at once."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from largest import assert_trees_close_by_largest
from tiers import full_but

from sharding.pipeline import split_passes

DEPTH, WIDTH, TOKENS = 4, 5, 3


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def layer(weight, x, other):
    # In another dtype, as networks cast their weights.
    return jnp.tanh(x @ weight.astype(jnp.bfloat16).astype(jnp.float32)) * other


def unrolled(run, weights, x, other, _=None):
    for weight in weights:
        x = run(weight, x, other)
    return x


def scanned(run, weights, x, other, _=None):
    return lax.scan(lambda x, weight: (run(weight, x, other), None), x, weights)[0]


def branched(run, weights, x, other, wanted=1.0):
    """The last layer only if it is wanted."""
    x = scanned(run, weights[:-1], x, other)
    return lax.cond(wanted > 0, lambda x: run(weights[-1], x, other), lambda x: x, x)


RUNS = {"unrolled": unrolled, "scanned": scanned, "branched": branched}
WEIGHTS, X, OTHER = draw(DEPTH, WIDTH, WIDTH), draw(TOKENS, WIDTH), 1 + draw(TOKENS, 1) ** 2


@pytest.mark.parametrize("remat", full_but([False, True], False))
@pytest.mark.parametrize("how", full_but(RUNS, "scanned", "branched"))
def test_split_passes_gradient_equals_vjp(how, remat):
    run = partial(RUNS[how], jax.checkpoint(layer) if remat else layer)

    def function(again, x, other):
        weights, scale = again
        return scale * run(weights, x, other, scale), jnp.sum(x)

    def at_once(weights, x):
        return function((weights, 3.0), x, OTHER)[0]

    passes = split_passes(function, (WEIGHTS, jnp.float32(2)), X, OTHER)
    # Other numbers than those it was made with.
    again = 2 * WEIGHTS, jnp.float32(3)
    (out, aux), kept = jax.jit(passes.forward)(again, 0.5 * X, OTHER)
    actual = jax.jit(passes.backward)(again, kept, jnp.cos(out))

    @jax.jit
    def expected(weights, x, slope):
        out, pull = jax.vjp(at_once, weights, x)
        return out, pull(slope)

    expected_out, gradients = expected(2 * WEIGHTS, 0.5 * X, jnp.cos(out))
    # The same operations, which the compiler may fuse in another way: float32, of which a gradient
    # is rounded to the 8 bits of bfloat16 where its weight was. An element near zero is a
    # difference of terms as large as its neighbours. Each layer rounds, and the next enlarges it.
    np.testing.assert_allclose(out, expected_out, rtol=1e-5)
    np.testing.assert_allclose(aux, jnp.sum(0.5 * X), rtol=1e-6)
    assert_trees_close_by_largest(actual, gradients, rtol=2**-7, of_largest=2e-6)


@pytest.mark.parametrize("how", RUNS)
def test_split_passes_keeps_no_weights(how):
    """Neither the weights nor their casts, each of which is larger than an activation."""

    def function(again, x, other):
        weights, wanted = again
        return RUNS[how](layer, weights, x, other, wanted), None

    again = WEIGHTS, jnp.float32(1)
    passes = split_passes(function, again, X, OTHER)
    _, kept = jax.eval_shape(passes.forward, again, X, OTHER)
    assert all(WIDTH * WIDTH not in (x.size, x.size // DEPTH) for x in kept)
    # What enters each layer and what its tanh gave, `other` and little else.
    assert sum(x.size for x in kept) <= 3 * DEPTH * X.size + 2 * DEPTH * OTHER.size


def test_split_passes_stores_a_residual_once():
    def function(again, x):
        y = jnp.sin(x)
        return (y * again[0], jnp.exp(y) * y), None

    passes = split_passes(function, (X,), X)
    assert len(passes.stored) < len(passes.output_indices)
    (out, _), kept = passes.forward((X,), X)
    _, pull = jax.vjp(lambda w, x: function((w,), x)[0], X, X)
    chex.assert_trees_all_close(passes.backward((X,), kept, out), pull(out), rtol=1e-6)
