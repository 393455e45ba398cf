"""Attention across cp reads what one device reads: values, gradients, and what it sends."""

import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh
from tiers import full_but

from moe.execution import Execution
from moe.remat import rematerialised
from moe.tokens.packing import pack_rows, pack_segments, pack_shared_prompts
from sharding.collectives import join_shards, own_shard
from sharding.folding import Layout, fold_abstract

# A distinct size for each axis; lengths that neither 4 nor 8 divides.
BATCH, PROMPT, RESPONSE, COPIES = 6, 7, 5, 3
TIME, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = PROMPT + RESPONSE, 16, 4, 10, 14
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


def batches(mesh, execution=None):
    tokens, valid = jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows())
    return {
        "rows": pack_rows(tokens, valid, mesh, execution),
        "shared prompts": pack_shared_prompts(tokens, valid, PROMPT, COPIES, mesh, execution),
        "packed": pack_segments(tokens, jnp.asarray(segments()), mesh, execution),
    }


def by_section(kind, x):
    """Whole rows as the sections of that packed."""
    return (x[::COPIES, :PROMPT], x[:, PROMPT:]) if kind == "shared prompts" else (x,)


def arrays(kind):
    """Queries, keys, values and what the sum weighs each element read by, 0 at padding."""
    draw = np.random.default_rng(0)
    sizes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM), (HEADS, V_HEAD_DIM)]
    whole = [draw.normal(size=(BATCH, TIME, *size)).astype(np.float32) for size in sizes]
    for x in whole[:3]:
        x[:, :PROMPT] = np.repeat(x[::COPIES, :PROMPT], COPIES, axis=0)
    whole[3] *= (segments() > 0 if kind == "packed" else valid_rows())[..., None, None]
    return whole


@functools.cache
def run(context, layout):
    """By packed: what is read and the gradients, in rows, and the collectives of both."""
    mesh = mesh_of(layout)
    zigzags = {kind: packed.zigzag for kind, packed in batches(mesh).items()}
    given = {
        kind: [zigzag.flatten(*by_section(kind, jnp.asarray(x))) for x in arrays(kind)]
        for kind, zigzag in zigzags.items()
    }
    spec = P(mesh.cp, mesh.tp)

    def local(given):
        results = {}
        for kind, packed in batches(mesh, Execution(context=context)).items():
            *inputs, weight = given[kind]
            attend = functools.partial(packed.core_attention_of_layer(0), scale=SCALE)
            out, back = jax.vjp(attend, *inputs)
            results[kind] = (out, *back(weight))
        return results

    step = on_mesh(local, mesh, (spec,), spec).lower(given).compile()
    results = {
        kind: [zigzags[kind].restore(jnp.asarray(jax.device_get(x))) for x in result]
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
            packed = pack_rows(
                jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows()), mesh, execution
            )
            own = (own_shard(packed.zigzag.flatten(x), mesh.cp) for x in given)
            read = packed.core_attention_of_layer(0)(*own, scale=SCALE)
            return packed.zigzag.restore(join_shards(read, mesh.cp))[0]

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
    """Forward and backward of the three batches: kinds of collectives, and elements sent."""
    ops = COLLECTIVE.findall(run(context, layout)[1])
    cp, tp = (getattr(Layout.parse(layout), axis) for axis in ("cp", "tp"))
    kinds = {
        "gather": {"all-gather": 2, "reduce-scatter": 2},
        "ring": {"collective-permute": 4 * (cp - 1)},
        "ulysses": {"all-to-all": 8},
    }
    assert Counter(op for _, op in ops) == {op: 3 * n for op, n in kinds[context].items()}
    # A gather's result is the whole, a scatter's a part, an all-to-all's as large as its argument.
    sent = {
        "all-gather": (cp - 1) / cp,
        "reduce-scatter": cp - 1,
        "all-to-all": (cp - 1) / cp,
        "collective-permute": 1,
    }
    total = sum(elements(shapes) * sent[op] for shapes, op in ops)
    tokens = sum(packed.zigzag.num_tokens for packed in batches(mesh_of(layout)).values())
    keys, queries = (heads // tp * (HEAD_DIM + V_HEAD_DIM) for heads in (KV_HEADS, HEADS))
    forward = tokens * (cp - 1) / cp * ((queries + keys) / cp if context == "ulysses" else keys)
    assert total == 2 * forward


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_ring_in_training_keeps_the_keys_of_every_hop(remat):
    """Between its passes a device has as many keys and values as if it had gathered them."""
    mesh, sizes = fold_abstract(Layout(cp=4)), {}

    def kept(context):
        def local(query, key, value):
            execution = Execution(context=context, attention="plain")
            packed = pack_rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), mesh, execution)
            attend = rematerialised(packed.core_attention_of_layer(0), remat)
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
        packed = pack_rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), mesh)
        return packed.core_attention_of_layer(0)(query, key, key)

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
        packed = pack_rows(jnp.zeros((1, 8), int), jnp.ones((1, 8), bool), mesh, execution)
        return packed.core_attention_of_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, jnp.zeros((8, 4, 6)), jnp.zeros((8, 2, 6)))
