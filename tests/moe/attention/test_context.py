"""Attention across cp reads what one device reads: values, gradients, and what it sends."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh, random_weights
from tiers import full_but

from moe import model
from moe.config import ModelConfig
from moe.execution import Execution
from moe.head import logits_of
from moe.remat import rematerialised
from moe.tokens.packing import packed, rows, shared_prompts
from moe.weights import specs
from sharding.collectives import all_sum, join_shards, own_shard
from sharding.folding import Layout, fold_abstract

# A distinct size for each axis; lengths that neither 4 nor 8 divides.
BATCH, PROMPT, RESPONSE, COPIES = 6, 7, 5, 3
TIME, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = PROMPT + RESPONSE, 16, 4, 10, 14
SCALE = 0.2


def valid_rows():
    """Prompts padded on the left, responses on the right."""
    prompts = np.repeat([4, 7], COPIES)
    responses = np.arange(BATCH) * 3 % RESPONSE + 1
    column = np.arange(TIME)[None, :]
    return (column >= PROMPT - prompts[:, None]) & (column < PROMPT + responses[:, None])


def segments():
    """Up to four sequences a row, some cut short by padding, ids in no order."""
    ids = np.zeros((BATCH, TIME), int)
    for row in range(BATCH):
        cuts = np.sort(np.random.default_rng(row).choice(np.arange(1, TIME), 3, replace=False))
        for number, (low, high) in enumerate(zip([0, *cuts], [*cuts, TIME], strict=True)):
            ids[row, low:high] = [3, 1, 12, 2][number]
    ids[2, 5:7] = 0
    ids[4] = 0
    return ids


def streams(mesh, execution=None):
    tokens, valid = jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows())
    return {
        "rows": rows(tokens, valid, mesh, execution),
        "shared prompts": shared_prompts(tokens, valid, PROMPT, COPIES, mesh, execution),
        "packed": packed(tokens, jnp.asarray(segments()), mesh, execution),
    }


def by_section(kind, x):
    """Whole rows as the sections of that stream."""
    return (x[::COPIES, :PROMPT], x[:, PROMPT:]) if kind == "shared prompts" else (x,)


def arrays(kind):
    """Queries, keys, values and what the sum weighs each element read by, 0 at padding."""
    draw = np.random.default_rng(0)
    sizes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)]
    whole = [draw.normal(size=(BATCH, TIME, *size)).astype(np.float32) for size in sizes]
    for x in whole[:3]:
        x[:, :PROMPT] = np.repeat(x[::COPIES, :PROMPT], COPIES, axis=0)
    whole[3] *= (segments() > 0 if kind == "packed" else valid_rows())[..., None, None]
    return whole


@functools.cache
def run(context, layout):
    """By stream: what is read and the gradients, in rows, and the collectives of both."""
    mesh = mesh_of(layout)
    orders = {kind: stream.order for kind, stream in streams(mesh).items()}
    given = {
        kind: [order.flatten(*by_section(kind, jnp.asarray(x))) for x in arrays(kind)]
        for kind, order in orders.items()
    }
    spec = P(mesh.cp, mesh.tp)

    def local(given):
        results = {}
        for kind, stream in streams(mesh, Execution(context=context)).items():
            *inputs, weight = given[kind]
            attend = functools.partial(stream.attend_in_layer(0), scale=SCALE)
            out, back = jax.vjp(attend, *inputs)
            results[kind] = (out, *back(weight))
        return results

    step = on_mesh(local, mesh, (spec,), spec).lower(given).compile()
    results = {
        kind: [orders[kind].restore(jnp.asarray(jax.device_get(x))) for x in result]
        for kind, result in step(given).items()
    }
    return jax.tree.map(np.asarray, results), step.as_text()


def visible_pairs(kind):
    """``[row, time, time]``, by definition."""
    ids = segments() if kind == "packed" else valid_rows().astype(int)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    return same & np.tri(TIME, dtype=bool)


@pytest.mark.parametrize("kind", ["rows", "shared prompts", "packed"])
def test_one_device_reads_what_it_may(kind):
    """Against a softmax in float64 over the pairs that the definition allows."""
    query, key, value, weight = (x.astype(np.float64) for x in arrays(kind))
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    visible = visible_pairs(kind)
    scores = np.einsum("bthk,bshk->bhts", query, key) * SCALE
    powers = np.where(visible[:, None], np.exp(scores), 0.0)
    total = np.maximum(powers.sum(axis=-1, keepdims=True), 1e-9)
    expected = np.einsum("bhts,bshk->bthk", powers / total, value)
    counted = np.any(weight != 0, axis=(2, 3))
    out = run(None, "dp1")[0][kind][0]
    for got, wanted, some in zip(
        out, by_section(kind, expected), by_section(kind, counted), strict=True
    ):
        np.testing.assert_allclose(got[some], wanted[some], atol=2e-6)


def test_a_ring_in_half_precision_errs_as_little_as_blocks():
    """Scores of a dozen or more, which half precision would round by several hundredths."""
    visible = visible_pairs("rows")
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in arrays("rows")[:3])
    query = query * 16
    wide = [np.asarray(x, np.float64) for x in (query, key, value)]
    wide[1:] = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in wide[1:])
    scores = np.einsum("bthk,bshk->bhts", *wide[:2]) * SCALE
    powers = np.where(visible[:, None], np.exp(scores), 0.0)
    total = np.maximum(powers.sum(axis=-1, keepdims=True), 1e-9)
    expected = np.einsum("bhts,bshk->bthk", powers / total, wide[2])

    def error(layout, execution):
        mesh = mesh_of(layout)

        def local(*given):
            stream = rows(jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows()), mesh, execution)
            own = (own_shard(stream.order.flatten(x), mesh.cp) for x in given)
            read = stream.attend_in_layer(0)(*own, scale=SCALE)
            return stream.order.restore(join_shards(read, mesh.cp))[0]

        out = on_mesh(local, mesh, (P(), P(), P()), P())(query, key, value)
        assert out.dtype == jnp.bfloat16
        return np.sqrt(np.mean((np.asarray(out, np.float64) - expected)[valid_rows()] ** 2))

    # Both round powers and results once; a fifth more or less is chance.
    assert error("cp2", Execution(context="ring")) < 1.2 * error(
        "dp1", Execution(attention="blocked")
    )


LAYOUTS = ["cp4", "tp2 cp2"]


@pytest.mark.parametrize("kind", ["rows", "shared prompts", "packed"])
@pytest.mark.parametrize("layout", full_but(LAYOUTS, "tp2 cp2"))
@pytest.mark.parametrize("context", ["gather", "ring", "ulysses"])
def test_equals_one_device(context, layout, kind):
    out, *grads = run(context, layout)[0][kind]
    expected, *expected_grads = run(None, "dp1")[0][kind]
    counted = by_section(kind, np.any(arrays(kind)[3] != 0, axis=(2, 3)))
    for got, wanted, some in zip(out, expected, counted, strict=True):
        np.testing.assert_allclose(got[some], wanted[some], atol=2e-6)
    # float32 sums over some dozens of pairs, of terms of order one.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, expected_grads)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(grads))


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("
)


def elements(shapes):
    return sum(
        math.prod(int(size) for size in shape.split(",") if size)
        for shape in re.findall(r"f32\[([\d,]*)\]", shapes)
    )


@pytest.mark.parametrize("layout", full_but(LAYOUTS, "tp2 cp2"))
@pytest.mark.parametrize("context", ["gather", "ring", "ulysses"])
def test_sends_what_the_docstring_says(context, layout):
    """Forward and backward of the three streams: kinds of collectives, and elements sent."""
    ops = COLLECTIVE.findall(run(context, layout)[1])
    cp, tp = (getattr(Layout.parse(layout), axis) for axis in ("cp", "tp"))
    kinds = {
        "gather": {"all-gather": 2, "reduce-scatter": 2},
        "ring": {"collective-permute": 4 * (cp - 1)},
        "ulysses": {"all-to-all": 8},
    }
    assert Counter(op for _, op in ops) == {op: 3 * n for op, n in kinds[context].items()}
    # A gather's result is the whole, a scatter's a part, an exchange's as large as its argument.
    sent = {
        "all-gather": (cp - 1) / cp,
        "reduce-scatter": cp - 1,
        "all-to-all": (cp - 1) / cp,
        "collective-permute": 1,
    }
    total = sum(elements(shapes) * sent[op] for shapes, op in ops)
    tokens = sum(stream.order.num_tokens for stream in streams(mesh_of(layout)).values())
    keys, queries = (heads // tp * (HEAD_DIM + VALUE_DIM) for heads in (KV_HEADS, HEADS))
    forward = tokens * (cp - 1) / cp * ((queries + keys) / cp if context == "ulysses" else keys)
    assert total == 2 * forward


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_ring_in_training_keeps_the_keys_of_every_hop(remat):
    """Between its passes a device has as many keys and values as if it had gathered them."""
    mesh, sizes = fold_abstract(Layout(cp=4)), {}

    def kept(context):
        def local(query, key, value):
            execution = Execution(context=context, attention="plain")
            stream = rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), mesh, execution)
            attend = rematerialised(stream.attend_in_layer(0), remat)
            out, pull = jax.vjp(attend, query, key, value)
            # Of heads 10 and 14 wide, keys and values; queries are 6 heads, these are 3.
            sizes[context] = sum(
                x.size
                for x in jax.tree.leaves(pull)
                if x.shape[-1:] in [(10,), (14,)] and 3 in x.shape
            )
            return out

        step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
        shapes = [(16, 6, 10), (16, 3, 10), (16, 3, 14)]
        jax.eval_shape(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    kept("ring")
    kept("gather")
    assert sizes["ring"] >= sizes["gather"] >= 16 * 3 * (10 + 14)


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "used"),
    [
        (2, 16, 8, "all_gather"),
        (4, 24, 8, "all_gather"),  # as many elements either way
        (4, 16, 8, "all_to_all"),
        (8, 16, 4, "all_gather"),  # a key/value head cannot be cut
    ],
)
def test_none_sends_least(cp, heads, kv_heads, used):
    """Ulysses trades queries and what is read too: it wins from ``heads / kv_heads + 1`` ranks."""
    mesh = fold_abstract(Layout(cp=cp))

    def local(query, key):
        stream = rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), mesh)
        return stream.attend_in_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    trace = jax.jit(step).trace(jnp.zeros((16, heads, 4)), jnp.zeros((16, kv_heads, 4)))
    assert set(re.findall(r"\b(all_gather|all_to_all|ppermute)\b", str(trace.jaxpr))) == {used}


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (Execution(context="ulysses"), r"the 2 key/value heads of a tp rank over cp=4"),
        (Execution(context="star"), r"context='star' is not known: choose among gather, ring, uly"),
        (
            Execution(context="ring", attention="xla"),
            r"cannot use execution.attention='xla': choose context=\"gather\"",
        ),
        (Execution(context="gather", attention="cudnn"), r"it runs on NVIDIA GPUs"),
    ],
)
def test_what_cannot_serve_is_refused(execution, message):
    mesh = fold_abstract(Layout(cp=4))

    def local(query, key):
        stream = rows(jnp.zeros((1, 8), int), jnp.ones((1, 8), bool), mesh, execution)
        return stream.attend_in_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, jnp.zeros((8, 4, 6)), jnp.zeros((8, 2, 6)))


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
            stream = packed(tokens, jnp.asarray(segments()), mesh, config.execution)
        else:
            stream = rows(tokens, jnp.asarray(valid), mesh, config.execution)
        x, stats = model.run(weights, stream, config, mesh)
        logprobs = jax.nn.log_softmax(logits_of(weights, x, config, mesh))
        chosen = own_shard(stream.order.flatten(follows), mesh.sequence)
        chosen = jnp.take_along_axis(logprobs, chosen[:, None], axis=1)[:, 0]
        used = own_shard(stream.order.flatten(counted), mesh.sequence)
        own = all_sum(-jnp.sum(jnp.where(used, chosen, 0.0)) / number, mesh.sequence)
        router = model.router_loss(stats, config, mesh, jnp.asarray(number))
        return all_sum(own + router, mesh.except_sequence), all_sum(stats, mesh.axes)

    spec = specs(config, mesh)
    step = on_mesh(jax.value_and_grad(loss, has_aux=True), mesh, (spec,), ((P(), P()), spec))
    return jax.device_get(step(random_weights(config, 0)))


@pytest.mark.parametrize(
    ("layout", "context"),
    full_but(
        [("dp1", None), ("cp2 tp2", "ring"), ("cp2 / ep2", "ulysses")], ("cp2 / ep2", "ulysses")
    ),
)
def test_packed_sequences_are_rows_of_their_own(layout, context):
    (value, stats), grads = trained(True, layout, context)
    (expected, expected_stats), expected_grads = trained(False, "dp1")
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * np.max(np.abs(b))),
        grads,
        expected_grads,
    )
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    np.testing.assert_array_equal(stats.tokens, CONFIG.num_layers * unpacked()[1].sum())
    for name in ("balance", "z", "entropy"):
        np.testing.assert_allclose(getattr(stats, name), getattr(expected_stats, name), rtol=1e-5)


def test_positions_restart_with_every_sequence():
    tokens = jnp.zeros((2, 7), int)
    ids = jnp.asarray([[2, 2, 1, 1, 1, 0, 3], [0, 5, 5, 0, 5, 7, 7]])
    stream = packed(tokens, ids, mesh_of("dp1"))
    expected = [[0, 1, 0, 1, 2, None, 0], [None, 0, 1, None, 2, 0, 1]]
    positions = stream.positions.reshape(2, 7)
    for row in range(2):
        for column, place in enumerate(expected[row]):
            assert place is None or int(positions[row, column]) == place
    np.testing.assert_array_equal(stream.weight.reshape(2, 7), ids > 0)
