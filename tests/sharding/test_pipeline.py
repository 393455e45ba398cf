"""A small network through a pipeline equals the same network in a loop."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from tiers import full_but

from sharding import pipeline
from sharding.collectives import all_sum, vary
from sharding.folding import Layout, fold
from sharding.pipeline import Pipeline, Stages

LAYERS, WIDTH, VOCAB, TOKENS = 8, 5, 7, 3


def blocks(layers, x):
    """Layers with a loss and a sum of their own."""
    loss, sums = jnp.zeros(()), []
    for layer in layers:
        x = x + jnp.tanh(x @ layer)
        loss = loss + 0.1 * jnp.sum(x**3)
        sums.append(jnp.sum(x))
    return x, loss, jnp.stack(sums)


def first(ends, micro_batch):
    return jnp.sin(ends["table"][micro_batch["tokens"]])


def last(ends, x, micro_batch):
    """Uses the weights that `first` uses, too."""
    error = x @ ends["table"].T - micro_batch["target"]
    return jnp.sum(jnp.square(error)), {"largest": jnp.max(error)}


STAGES = Stages(first, lambda layers, x, micro_batch, number: blocks(layers, x), last)


def network(num_micro_batches):
    draw = np.random.default_rng(0)

    def normal(*shape):
        return (draw.normal(size=shape) / 2).astype(np.float32)

    micro_batches = {
        "tokens": draw.integers(0, VOCAB, (num_micro_batches, TOKENS)).astype(np.int32),
        "target": normal(num_micro_batches, TOKENS, VOCAB),
    }
    return {"table": normal(VOCAB, WIDTH)}, normal(LAYERS, WIDTH, WIDTH), micro_batches


def plain(ends, layers, micro_batches):
    """The loss of all pieces; per piece the last loss and metrics, and the layers' sums."""

    def one(micro_batch):
        x, loss, sums = blocks(layers, first(ends, micro_batch))
        last_loss, metrics = last(ends, x, micro_batch)
        return loss + last_loss, (last_loss, metrics, sums)

    losses, (last_losses, metrics, sums) = jax.vmap(one)(micro_batches)
    return jnp.sum(losses), (last_losses, metrics, jnp.sum(sums, axis=0))


@functools.cache
def program(layout, num_micro_batches, num_chunks, forward_only=False):
    """The compiled pipeline, and what it is called with."""
    parsed = Layout.parse(layout)
    mesh = fold(parsed, jax.devices()[: parsed.num_devices])
    others = tuple(axis for axis in mesh.axes if axis not in mesh.pp)

    def local(ends, layers, micro_batches):
        ends, layers = vary((ends, layers), mesh.axes)
        micro_batches = vary(micro_batches, mesh.axes)
        where = Pipeline(mesh.pp, mesh.axes, num_chunks)

        def settled(tree):
            return jax.tree.map(lambda x: jax.lax.psum(x, others), tree)

        if forward_only:
            outs, sums = pipeline.apply(STAGES, ends, layers, micro_batches, where)
            return settled(outs), settled(sums)
        sums = pipeline.gradients(STAGES, ends, layers, micro_batches, where)
        return (
            all_sum(sums.loss, mesh.axes),
            all_sum(sums.embed_and_head, mesh.axes),
            *settled((sums.layers, sums.metrics, sums.statistics)),
        )

    stacked = P(None, mesh.pp)
    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh.mesh,
            in_specs=(P(), stacked, P()),
            out_specs=(P(), stacked) if forward_only else (P(), P(), stacked, P(), stacked),
        ),
        compiler_options={"xla_backend_optimization_level": "0"},
    )
    ends, layers, micro_batches = network(num_micro_batches)
    inputs = ends, layers.reshape(num_chunks, -1, WIDTH, WIDTH), micro_batches
    return step.lower(*inputs).compile(), inputs


CASES = [
    ("dp1", 3, 1),
    ("pp2", 4, 1),
    ("pp2", 3, 1),
    ("pp4", 1, 1),
    ("pp4", 6, 1),
    ("pp2", 4, 2),
    ("pp4", 8, 2),
    # Neither pp nor what is kept divides the number of micro-batches.
    ("pp4", 5, 2),
    ("pp2", 3, 4),
]
# float32 sums of a few hundred terms in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "num_chunks"),
    full_but(CASES, ("pp4", 5, 2)),
)
def test_values_and_gradients_are_those_of_a_loop(layout, num_micro_batches, num_chunks):
    step, inputs = program(layout, num_micro_batches, num_chunks)
    loss, ends_grad, layers_grad, metrics, sums = jax.device_get(step(*inputs))
    ends, layers, micro_batches = network(num_micro_batches)
    by_hand = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))
    (expected, (_, expected_metrics, expected_sums)), expected_grads = jax.device_get(
        by_hand(ends, layers, micro_batches)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    grads = ends_grad["table"], layers_grad.reshape(layers.shape)
    expected_grads = (expected_grads[0]["table"], expected_grads[1])
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-5, of_largest=2e-6)
    np.testing.assert_allclose(metrics["largest"], expected_metrics["largest"], **CLOSE)
    np.testing.assert_allclose(sums.reshape(-1), expected_sums, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "num_chunks"), [("pp4", 6, 1), ("pp2", 3, 2)]
)
def test_forward_alone_is_that_of_a_loop(layout, num_micro_batches, num_chunks):
    step, inputs = program(layout, num_micro_batches, num_chunks, forward_only=True)
    (losses, metrics), sums = jax.device_get(step(*inputs))
    by_hand = jax.jit(plain)(*network(num_micro_batches))
    _, (expected, expected_metrics, expected_sums) = jax.device_get(by_hand)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    np.testing.assert_allclose(metrics["largest"], expected_metrics["largest"], **CLOSE)
    np.testing.assert_allclose(sums.reshape(-1), expected_sums, **CLOSE)


def permutes(step):
    """The pairs of each collective-permute in the compiled program."""
    result = re.findall(
        r"collective-permute(?:-start)?\(.*source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}",
        step.as_text(),
    )
    return sorted(re.findall(r"\d+,\d+", pairs) for pairs in result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "num_chunks", "forward_only", "expected"),
    [
        # Half of the stages after even ticks, the others after odd ones.
        ("pp4", 6, 1, False, [["0,1", "2,3"], ["1,0", "3,2"], ["1,2"], ["2,1"]]),
        ("pp2", 4, 2, False, [["0,1", "1,0"], ["0,1", "1,0"]]),
        ("pp4", 6, 1, True, [["0,1", "1,2", "2,3"]]),
    ],
)
def test_messages_go_to_neighbours(layout, num_micro_batches, num_chunks, forward_only, expected):
    """One message each way per tick, around the end only where micro-batches come round again."""
    assert permutes(program(layout, num_micro_batches, num_chunks, forward_only)[0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_chunks", "numbers"),
    [("pp2", 1, (4, 64)), ("pp2", 2, (8, 64))],
)
def test_more_micro_batches_take_no_more_memory(layout, num_chunks, numbers):
    """But for the metrics of each, a number apiece in two buffers."""
    few, many = (
        program(layout, number, num_chunks)[0].memory_analysis().temp_size_in_bytes
        for number in numbers
    )
    assert many - few <= 3 * 4 * (numbers[1] - numbers[0])
