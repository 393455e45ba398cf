"""A backward pass that repeats all but named values is the gradient that JAX takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from largest import assert_trees_close_by_largest

from moe.remat import save_only_named

TOKENS, WIDTH, DEPTH = 3, 4, 5


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


WEIGHTS, X, SCALE = draw(DEPTH, WIDTH, WIDTH) / 3, draw(TOKENS, WIDTH), draw(WIDTH)
NUMBERS = jnp.arange(TOKENS)


def layer(weight, x, numbers):
    """A result that carries on, and beside it one of integers and one that a loss has of its own.

    It closes over an array.
    """
    product = checkpoint_name((SCALE[None] * jnp.tanh(x)) @ weight, "product")
    after = x + jnp.sin(product) @ weight
    return after, {"numbers": numbers + 1, "loss": jnp.sum(jnp.square(product))}


def repeated(in_scan=False, names=("product",), present=None):
    return save_only_named(layer, names, in_scan, present)


def unrolled(run, weights, x):
    total = 0.0
    for weight in weights:
        x, out = run(weight, x, NUMBERS)
        total = total + out["loss"]
    return x, total


def scanned(run, weights, x):
    x, out = lax.scan(lambda x, weight: run(weight, x, NUMBERS), x, weights)
    return x, jnp.sum(out["loss"])


def pulled(stack, run):
    def function(weights, x, slope):
        out, pull = jax.vjp(lambda weights, x: stack(run, weights, x), weights, x)
        return out, pull((slope, jnp.float32(2)))

    return jax.jit(function)(WEIGHTS, X, jnp.cos(X))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("product",), (), ("tanh",)])
@pytest.mark.parametrize("stack", [unrolled, scanned])
def test_values_and_gradients_are_those_of_the_function(stack, names):
    found, expected = pulled(stack, repeated(stack is scanned, names)), pulled(stack, layer)
    # The same operations, which the compiler may fuse in another way: float32, an element near zero
    # a difference of terms as large as its neighbours.
    assert_trees_close_by_largest(found, expected, rtol=2e-5, of_largest=2e-6)


def test_integers_come_out_as_they_are():
    _, out = repeated()(WEIGHTS[0], X, NUMBERS)
    np.testing.assert_array_equal(out["numbers"], NUMBERS + 1)


def kept(run):
    _, pull = jax.vjp(lambda weight, x: run(weight, x, NUMBERS)[0], WEIGHTS[0], X)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull))


def test_save_only_named_keeps_needed_names():
    arguments = [(TOKENS, WIDTH), (WIDTH,), (WIDTH, WIDTH)]
    assert kept(repeated(names=())) == arguments
    assert kept(repeated()) == [(TOKENS, WIDTH), *arguments]
    # Of a primitive's results too.
    assert kept(repeated(names=("sin",))) == [(TOKENS, WIDTH), *arguments]
    assert kept(repeated(names=("stop_gradient",))) == arguments


def test_a_scan_keeps_no_weights():
    """They are there when it goes backward."""
    program = jax.make_jaxpr(jax.grad(lambda w: scanned(repeated(True), w, X)[1]))(WEIGHTS)
    forward, _ = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    assert WEIGHTS.shape not in [v.aval.shape for v in forward.outvars]
    assert [v.aval.shape for v in forward.outvars].count((DEPTH, *X.shape)) == 2


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner)


@pytest.mark.parametrize("present", [True, False])
def test_a_function_that_is_absent_gives_zeros(present):
    run = repeated(present=jnp.asarray(present))
    (out, beside), pull = jax.vjp(lambda w, x: run(w, x, NUMBERS), WEIGHTS[0], X)
    slopes = (jnp.cos(X), {"numbers": np.zeros(TOKENS, jax.dtypes.float0), "loss": jnp.float32(2)})
    expected, expected_pull = jax.vjp(lambda w, x: layer(w, x, NUMBERS), WEIGHTS[0], X)
    wanted = (*expected_pull(slopes), *jax.tree.leaves(expected))
    for found, one in zip((*pull(slopes), out, *beside.values()), wanted, strict=True):
        np.testing.assert_allclose(found, np.asarray(one) * present, rtol=2e-6, atol=1e-6)
    program = jax.make_jaxpr(lambda w, x: run(w, x, NUMBERS))(WEIGHTS[0], X)
    assert [name for name in primitives(program.jaxpr) if name in ("cond", "dot_general")] == [
        "cond",
        "dot_general",
        "dot_general",
    ]
