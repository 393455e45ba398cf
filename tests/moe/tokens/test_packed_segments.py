"""Several sequences in a row give what they give in rows of their own."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from programs import jit, mesh_of, on_mesh, random_weights

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.head import logits_of
from moe.placement import specs
from moe.router.balance import router_loss
from moe.tokens.packing import pack_rows, pack_segments
from sharding.collectives import all_sum, local_shard

# A distinct size for each axis; lengths that neither 4 nor 8 divides.
BATCH, PROMPT, RESPONSE, COPIES = 6, 7, 5, 3
TIME, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = PROMPT + RESPONSE, 16, 4, 10, 14


def segments():
    """Up to four sequences a row, some cut short by padding, ids in no order."""
    ids = np.zeros((BATCH, TIME), int)
    for row in range(BATCH):
        cuts = np.sort(np.random.default_rng(row).choice(np.arange(1, TIME), 3, replace=False))
        for number, (low, high) in enumerate(zip([0, *cuts], [*cuts, TIME], strict=True)):
            ids[row, low:high] = 12 * (BATCH - row - 1) + [3, 1, 12, 2][number]
    ids[2, 5:7] = 0
    ids[4] = 0
    return ids


CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=1,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=4,
    experts_per_token=2,
    d_expert=7,
    # Large enough that a router loss that is not the same shows in every gradient.
    load_balance_coef=0.5,
    router_z_coef=0.1,
)


def unpacked():
    """Each sequence in a row of its own, and where its tokens stand among the packed ones."""
    ids = segments()
    places = [
        (row, np.flatnonzero(ids[row] == number))
        for row in range(BATCH)
        for number in np.unique(ids[row])
        if number
    ]
    index = np.zeros((len(places), TIME), int)
    valid = np.zeros(index.shape, bool)
    for n, (row, columns) in enumerate(places):
        index[n, : len(columns)] = row * TIME + columns
        valid[n, : len(columns)] = True
    return index, valid


@functools.cache
def trained(is_packed, layout, context=None):
    """Loss, log-probability of the following token, router sums and gradients."""
    config = replace(CONFIG, execution=Execution(context=context))
    mesh = mesh_of(layout)
    network = Model(config, mesh)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (BATCH, TIME))
    index, valid = unpacked()
    follows = np.zeros(BATCH * TIME, int)
    counted = np.zeros(BATCH * TIME, bool)
    for row, some in zip(index, valid, strict=True):
        columns = row[some]
        follows[columns[:-1]] = tokens.reshape(-1)[columns[1:]]
        counted[columns[:-1]] = True
    if not is_packed:
        tokens, follows = tokens.reshape(-1)[index], follows[index]
        counted = counted[index] & valid
    tokens, follows, counted = (
        jnp.asarray(np.reshape(x, tokens.shape)) for x in (tokens, follows, counted)
    )
    number = int(valid.sum())

    def loss(weights):
        if is_packed:
            packed = pack_segments(tokens, jnp.asarray(segments()), 12 * BATCH, network)
        else:
            packed = pack_rows(tokens, jnp.asarray(valid), network)
        x, stats = model.run(weights, packed, network)
        logprobs = jax.nn.log_softmax(logits_of(weights, x, network))
        chosen = local_shard(packed.zigzag.flatten(follows), mesh.sequence)
        chosen = jnp.take_along_axis(logprobs, chosen[:, None], axis=1)[:, 0]
        used = local_shard(packed.zigzag.flatten(counted), mesh.sequence)
        own = all_sum(-jnp.sum(jnp.where(used, chosen, 0.0)) / number, mesh.sequence)
        router = router_loss(stats, network, jnp.asarray(number))
        return all_sum(own + router, mesh.except_sequence), all_sum(stats, mesh.axes)

    spec = specs(network)
    step = on_mesh(jax.value_and_grad(loss, has_aux=True), mesh, (spec,), ((P(), P()), spec))
    return jax.device_get(step(random_weights(config, 0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "context"),
    [("dp1", None), ("cp2 tp2", "ring"), ("cp2 / ep2", "ulysses")],
)
def test_packed_sequences_are_rows_of_their_own(layout, context):
    (value, stats), grads = trained(True, layout, context)
    (expected, expected_stats), expected_grads = trained(False, "dp1")
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-4, of_largest=2e-6)
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    np.testing.assert_array_equal(stats.tokens, CONFIG.num_layers * unpacked()[1].sum())
    for name in ("balance", "z", "entropy"):
        np.testing.assert_allclose(getattr(stats, name), getattr(expected_stats, name), rtol=1e-5)


def test_positions_restart_with_every_sequence():
    ids = np.asarray([[2, 2, 1, 1, 1, 0, 3], [0, 5, 5, 0, 5, 7, 7]], np.int32)

    @jit
    def parts(ids):
        packed = pack_segments(jnp.zeros(ids.shape, int), ids, 7, Model(CONFIG, mesh_of("dp1")))
        return packed.positions.reshape(ids.shape), packed.multiplicity.reshape(ids.shape)

    positions, multiplicity = jax.device_get(parts(ids))
    expected = [[0, 1, 0, 1, 2, None, 0], [None, 0, 1, None, 2, 0, 1]]
    for row in range(2):
        for column, place in enumerate(expected[row]):
            assert place is None or int(positions[row, column]) == place
    np.testing.assert_array_equal(multiplicity, ids > 0)


def test_choices_to_replay_stand_with_their_tokens():
    choices = np.random.default_rng(3).integers(0, 4, (2, BATCH, TIME, 3)).astype(np.uint8)

    @jit
    def by_layer(ids, choices):
        tokens, model = jnp.zeros((BATCH, TIME), int), Model(CONFIG, mesh_of("cp2"))
        packed = pack_segments(tokens, ids, 12 * BATCH, model, replay=choices)
        return [packed.zigzag.restore(packed.for_layer(layer).replay)[0] for layer in range(2)]

    np.testing.assert_array_equal(by_layer(segments().astype(np.int32), choices), choices)
