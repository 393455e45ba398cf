"""What a pipeline's stage keeps of micro-batches that are on their way."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import mesh_of, random_weights
from small_networks import ROUTED

from moe import model, stages
from moe.config import Model
from moe.execution import Execution
from moe.placement import in_chunks, specs
from moe.tokens.packing import pack_rows
from sharding.collectives import all_sum, vary
from sharding.schedule import Schedule

ROWS, TIME = 2, 6
"""Of a micro-batch, on each device."""


def packed(tokens, config, mesh):
    return pack_rows(tokens, tokens < ROUTED.vocab_size, Model(config, mesh))


def scans(jaxpr):
    """Every loop of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)


@functools.cache
def carried(layout, remat, number, scan_layers=False, num_layers=ROUTED.num_layers):
    """Bytes that a stage carries from tick to tick."""
    mesh = mesh_of(layout)
    execution = Execution(remat=remat, scan_layers=scan_layers)
    config = replace(ROUTED, num_layers=num_layers, execution=execution)

    network = Model(config, mesh)

    def local(weights, tokens):
        loss, *_ = stages.gradients(
            vary(weights, mesh.axes),
            vary(tokens, mesh.except_sequence),
            stages.Ends(
                lambda tokens: packed(tokens, config, mesh),
                lambda weights, x, tokens: (jnp.sum(x), {}),
                tokens.size,
            ),
            network,
        )
        return all_sum(loss, mesh.axes)

    spec = specs(network)
    on_mesh = jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, P(None, mesh.dp)), out_specs=P())
    weights = in_chunks(random_weights(config, 0), mesh)
    tokens = np.zeros((number, ROWS * mesh.layout.dp, TIME), np.int32)
    traced = jax.make_jaxpr(on_mesh)(weights, tokens)
    ticks = Schedule(mesh.layout.pp, number, mesh.layout.vpp).ticks
    # There are short loops inside, too. This one gives nothing but what it carried.
    loop = max(scans(traced.jaxpr), key=lambda scan: len(scan.outvars))
    assert loop.params["length"] == ticks
    return sum(x.aval.size * x.aval.dtype.itemsize for x in loop.outvars)


def kept_without_a_pipeline(layers, remat, scan_layers=False):
    """Bytes that `jax.vjp` keeps of so many layers and one micro-batch, without the weights."""
    mesh, sizes = mesh_of("dp1"), []
    execution = Execution(remat=remat, scan_layers=scan_layers)
    config = replace(ROUTED, num_layers=layers, execution=execution)

    network = Model(config, mesh)

    def local(weights, tokens):
        own = weights.layers
        x = vary(jnp.ones((tokens.size, config.d_model)), mesh.axes)

        def run(own, x):
            x, stats, _ = model.blocks(own, x, packed(tokens, config, mesh), network)
            return x, stats

        x, pull, _ = jax.vjp(run, own, x, has_aux=True)
        of_weights = {
            shape for leaf in jax.tree.leaves(own) for shape in (leaf.shape, leaf.shape[1:])
        }
        # Each once, though several parts of the backward pass may ask for it.
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if leaf.shape not in of_weights}
        sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in kept.values()))
        return all_sum(jnp.sum(x), mesh.axes)

    on_mesh = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(specs(network), P(mesh.dp)), out_specs=P()
    )
    jax.eval_shape(on_mesh, random_weights(config, 0), np.zeros((ROWS, TIME), np.int32))
    return sizes[0]


KEPT = [
    *(("none", False), ("selective", False), ("projections", False), ("full", False)),
    ("selective", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "scan_layers"), KEPT)
def test_stage_residuals_equal_one_device(remat, scan_layers):
    of_one = carried("pp2", remat, 2, scan_layers) - carried("pp2", remat, 1, scan_layers)
    alone = kept_without_a_pipeline(ROUTED.num_layers // 2, remat, scan_layers)
    # Constants that cost nothing are made again; of the embedding a stage keeps a few numbers per
    # token.
    assert 0.9 * alone < of_one <= alone + 12 * ROWS * TIME


@pytest.mark.slow
def test_as_many_chunks_are_kept_as_there_are_stages():
    """Of 1F1B p, and of interleaved stages p v + p - 1."""
    assert carried("pp2", "full", 1) < carried("pp2", "full", 2) == carried("pp2", "full", 8)
    four, eight = (carried("pp2 vpp2", "full", number, num_layers=4) for number in (4, 8))
    assert four == eight
