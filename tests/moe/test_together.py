"""Techniques that change when a network computes and sends, together: values, gradients and router
sums of one device that computes everything at once."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_precision import assert_near_for_half_precision
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from programs import jit, mesh_of, random_weights
from small_networks import ROUTED, any_choices, ragged_rows
from whole_network import loss_and_gradient, replay_of, token_loss

from jrl.trainer.learner.accumulation import accumulate_with_overlapped_reduction
from moe import model
from moe.config import Model
from moe.execution import Execution
from moe.placement import in_chunks, in_layer_order, shard_dims, shard_specs, specs
from moe.router.balance import router_loss
from moe.tokens.packing import pack_rows
from sharding.collectives import all_sum, vary
from sharding.zero import Reduction

CONFIG = replace(ROUTED, vocab_size=12)
BATCH, TIME = 8, 8


def on_their_way(config, mesh):
    """`loss_and_gradient` with two micro-batches on a device, the last of which sums each layer's
    gradient over devices when it has left the layer."""
    network = Model(config, mesh)
    cuts = shard_dims(network)
    alone = jax.tree.map(lambda _: False, cuts)
    reductions = jax.tree.map(partial(Reduction, mesh), specs(network), cuts, alone)

    def local(weights, piece):
        num_tokens = all_sum(jnp.sum(piece[1].astype(jnp.int32)), mesh.dp)

        def loss_of(own, piece):
            piece = vary(piece, mesh.except_sequence)
            packed = pack_rows(*piece[:2], network, replay_of(piece))
            x, stats = model.run(own, packed, network)
            total = token_loss(own, x, piece, num_tokens, config, mesh)
            total = total + router_loss(stats, network, num_tokens)
            return all_sum(total, mesh.except_sequence), all_sum(stats, mesh.axes)

        pieces = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), piece)
        given = vary(weights, mesh.axes), reductions, pieces, None, mesh.axes
        loss, grads, stats = accumulate_with_overlapped_reduction(loss_of, *given)
        return (loss, jax.tree.map(lambda x: jnp.sum(x, axis=0), stats)), grads

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(network), P(mesh.dp)),
        out_specs=((P(), P()), shard_specs(network)),
    )


@functools.cache
def run(layout, dtype, replayed, execution):
    config, mesh = replace(CONFIG, dtype=dtype, execution=execution), mesh_of(layout)
    piece = ragged_rows(CONFIG, BATCH, TIME)
    if replayed:
        piece = *piece, any_choices(CONFIG, BATCH, TIME)
    program = on_their_way if execution.overlap_grad_reduce else loss_and_gradient
    weights = in_chunks(random_weights(config, 0), mesh)
    out, grads = jax.device_get(jit(program(config, mesh))(weights, piece))
    return out, in_layer_order(grads, mesh, config.num_layers)


SELECTIVE = {"remat": "selective", "dispatch": "all_to_all"}
TOGETHER = {
    **SELECTIVE,
    "two_batch_overlap": True,
    "expert_chunks": 2,
    "overlap_grad_reduce": True,
}
MESH = "tp2 cp2 dp2 / ep4 etp2"
# Layout, dtype, whether choices are replayed, execution. In half precision roundings would decide
# between two experts that are all but equal.
CASES = {
    "half precision": (MESH, "bfloat16", True, SELECTIVE),
    "room for some": ("dp4 / ep4", "float32", False, {**SELECTIVE, "buffer_factor": 3.0}),
    "replayed": ("tp2 dp2 / ep4", "float32", True, {**SELECTIVE, "dispatch": "all_gather"}),
    "all": (MESH, "float32", True, {**TOGETHER, "buffer_factor": 3.0, "context": "ulysses"}),
    "all of them in half precision": (
        *(MESH, "bfloat16", True),
        {**TOGETHER, "dispatch": "all_gather", "scan_layers": True},
    ),
    "through a pipeline": (
        *("pp2 dp2 tp2 / ep2", "float32", True),
        {**TOGETHER, "overlap_grad_reduce": False, "buffer_factor": 3.0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device_that_keeps_everything(case):
    layout, dtype, replayed, execution = CASES[case]
    (value, stats), grads = run(layout, dtype, replayed, Execution(**execution))
    plain = run("dp1", dtype, replayed, Execution())
    (expected, expected_stats), expected_grads = plain
    assert all(float(np.max(np.abs(leaf))) > 0 for leaf in jax.tree.leaves(grads))
    if execution.get("buffer_factor"):
        assert float(stats.overflow) == 0
    if replayed:
        np.testing.assert_array_equal(stats.replayed, expected_stats.replayed)
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    if dtype == "float32":
        # float32 sums of a few hundred terms in another order. An element near zero is a difference
        # of terms as large as its neighbours, with their error.
        np.testing.assert_allclose(value, expected, rtol=2e-6)
        assert_trees_close_by_largest(grads, expected_grads, rtol=2e-4, of_largest=2e-6)
        return
    # The mean over tokens of what roundings to 8 bits do to a hidden state, and some fifty of 2^-9
    # each one after the other, in no order.
    np.testing.assert_allclose(value, expected, rtol=2**-8)
    _, precise = run("dp1", "float32", replayed, Execution())
    assert_near_for_half_precision(grads, expected_grads, precise)
