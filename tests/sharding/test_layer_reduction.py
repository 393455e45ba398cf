"""Gradients summed in the backward pass: the bits of a sum that is taken afterwards."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh

from sharding.collectives import vary
from sharding.zero import Reduced, Reduction, shard_dim, weights_of

DEPTH, WIDTH, ROWS = 3, 8, 5


def through(layers, x):
    """A loop over layers; a bfloat16 weight has a bfloat16 gradient."""

    def layer(x, weight):
        (weight,) = weights_of([weight])
        return jnp.tanh(x @ weight.astype(jnp.float32)), None

    return jnp.sum(lax.scan(layer, x, layers)[0])


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_reduction_inside_layers_is_bit_exact(wire):
    mesh, draw = mesh_of("cp2 dp2"), np.random.default_rng(0)
    stored, shape = P(None, None, None), (DEPTH, WIDTH, WIDTH)
    reduction = Reduction(mesh, stored, shard_dim(stored, shape, mesh, first=1, comm_dtype=wire))
    assert len(reduction.sharded_dim.stages) == 2
    weight = jnp.asarray(draw.normal(size=shape), jnp.bfloat16)
    x, before = (jnp.asarray(draw.normal(size=(4, *of)), jnp.float32) for of in [(ROWS, 8), shape])

    def local(weight, x, before):
        own = vary(weight, mesh.axes)
        (x,), (before,) = x, before
        x, before = vary((x, before), mesh.axes)
        after = reduction(before + jax.grad(through)(own, x).astype(jnp.float32))

        def on_the_way(place, before):
            return through(Reduced(own, before, place, reduction), x)

        place = reduction.sum_zeros(own)
        single = reduction(jax.grad(through)(own, x).astype(jnp.float32))
        return [
            (jax.grad(on_the_way)(place, before), after),
            (jax.grad(partial(on_the_way, before=None))(place), single),
        ]

    ranks = (*mesh.cp, *mesh.dp)
    cut = [None] * 3
    cut[reduction.sharded_dim.dim] = reduction.sharded_dim.atoms
    program = on_mesh(local, mesh, (P(), P(ranks), P(ranks)), P(*cut))
    for early, late in program(weight, x, before):
        assert early.shape == shape and np.any(late != 0)
        np.testing.assert_array_equal(early, late)
