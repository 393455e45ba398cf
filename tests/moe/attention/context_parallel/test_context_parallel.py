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
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import array_sizes, jit, mesh_of, on_mesh
from tiers import full_but

from moe.attention.context_parallel.choice import received
from moe.config import ModelConfig
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
            ids[row, low:high] = 12 * (BATCH - row - 1) + [3, 1, 12, 2][number]
    ids[2, 5:7] = 0
    ids[4] = 0
    return ids


def network(execution=None, heads=HEADS, kv_heads=KV_HEADS):
    """A network with such heads, as far as attention and the order of tokens know of it."""
    execution = Execution() if execution is None else execution
    return ModelConfig(vocab_size=2, num_heads=heads, num_kv_heads=kv_heads, execution=execution)


KINDS = ["rows", "shared prompts", "packed"]


def batches(mesh, config=None):
    tokens, valid = jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows())
    return {
        "rows": pack_rows(tokens, valid, mesh, config),
        "shared prompts": pack_shared_prompts(tokens, valid, PROMPT, COPIES, mesh, config),
        "packed": pack_segments(tokens, jnp.asarray(segments()), 12 * BATCH, mesh, config),
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


WINDOWS = {
    "tp2 cp2": {"rows": None, "shared prompts": 6, "packed": 2},
    "cp4": {"rows": 4, "shared prompts": None, "packed": None},
}
"""What is covered by a layout has a window in one of the two."""


@functools.cache
def run(context, layout, windows="tp2 cp2"):
    """By packed: what is read and the gradients, in rows; and the program of both, compiled and
    traced."""
    mesh, (way, _, attention) = mesh_of(layout), (context or "").partition(" ")
    config = network(Execution(context=way or None, attention=attention or None))

    def flattened(whole):
        packed = batches(mesh, config)
        return {
            kind: [packed[kind].zigzag.flatten(*by_section(kind, x)) for x in whole[kind]]
            for kind in whole
        }

    def restored(results):
        packed = batches(mesh, config)
        return {kind: [packed[kind].zigzag.restore(x) for x in results[kind]] for kind in results}

    given = jax.device_get(jit(flattened)({kind: arrays(kind) for kind in KINDS}))
    spec = P(mesh.cp, mesh.tp)

    def local(given):
        results = {}
        for kind, packed in batches(mesh, config).items():
            *inputs, weight = given[kind]
            window = WINDOWS[windows][kind]
            attend = functools.partial(packed.core_attention_of_layer(0, window), scale=SCALE)
            out, back = jax.vjp(attend, *inputs)
            results[kind] = (out, *back(weight))
        return results

    traced = on_mesh(local, mesh, (spec,), spec).trace(given)
    step = traced.lower().compile()
    results = jit(restored)(jax.device_get(step(given)))
    return jax.device_get(results), step.as_text(), traced.jaxpr.jaxpr


def visible_pairs(kind, window=None):
    """``[row, time, time]``, by definition."""
    ids = segments() if kind == "packed" else valid_rows().astype(int)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    earlier = same & np.tri(TIME, dtype=bool)
    # Keys of the own sequence from each on to the query, both included.
    until = np.cumsum(earlier[:, :, ::-1], axis=2)[:, :, ::-1]
    return earlier & (until <= (window or TIME))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", full_but(WINDOWS, "tp2 cp2"))
def test_one_device_reads_what_it_may(kind, windows):
    """Against a softmax in float64 over the pairs that the definition allows."""
    query, key, value, weight = (x.astype(np.float64) for x in arrays(kind))
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    visible = visible_pairs(kind, WINDOWS[windows][kind])
    scores = np.einsum("bthk,bshk->bhts", query, key) * SCALE
    powers = np.where(visible[:, None], np.exp(scores), 0.0)
    total = np.maximum(powers.sum(axis=-1, keepdims=True), 1e-9)
    expected = np.einsum("bhts,bshk->bthk", powers / total, value)
    counted = np.any(weight != 0, axis=(2, 3))
    out = run(None, "dp1", windows)[0][kind][0]
    for got, wanted, some in zip(
        out, by_section(kind, expected), by_section(kind, counted), strict=True
    ):
        np.testing.assert_allclose(got[some], wanted[some], atol=2e-6)


def test_a_ring_in_half_precision_errs_as_little_as_blocks():
    """Scores of a dozen or more, which half precision would round by several hundredths."""
    visible = visible_pairs("rows")
    query, key, value = (x.astype(jnp.bfloat16) for x in arrays("rows")[:3])
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
                jnp.zeros((BATCH, TIME), int),
                jnp.asarray(valid_rows()),
                mesh,
                network(execution),
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
CONTEXTS = ["gather", "ring", "ulysses"]
# The whole network gathers in `tests/moe/test_mesh_parity.py`.
QUICK = ["ring", "ulysses"]
KERNELS = ["gather blocked", "gather xla", "ulysses blocked", "ulysses xla"]


CASES = [
    *((context, layout) for context in CONTEXTS for layout in LAYOUTS),
    *((kernel, "tp2 cp2") for kernel in KERNELS),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("context", "layout"), full_but(CASES, *((context, "tp2 cp2") for context in QUICK))
)
def test_equals_one_device(context, layout, kind):
    out, *grads = run(context, layout, layout)[0][kind]
    expected, *expected_grads = run(None, "dp1", layout)[0][kind]
    counted = by_section(kind, np.any(arrays(kind)[3] != 0, axis=(2, 3)))
    for got, wanted, some in zip(out, expected, counted, strict=True):
        np.testing.assert_allclose(got[some], wanted[some], atol=2e-6)
    # float32 sums over some dozens of pairs, of terms of order one.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, expected_grads)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(grads))


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("
)


def permuted(jaxpr):
    """The elements of every permute of a traced program, in loops as often as they run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            yield equation.outvars[0].aval.size
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from list(permuted(inner)) * times


def elements(shapes):
    return sum(
        math.prod(int(size) for size in shape.split(",") if size)
        for shape in re.findall(r"f32\[([\d,]*)\]", shapes)
    )


@pytest.mark.parametrize("layout", full_but(LAYOUTS, "tp2 cp2"))
@pytest.mark.parametrize("context", full_but(CONTEXTS, *QUICK))
def test_sends_what_the_docstring_says(context, layout):
    """Forward and backward of the three batches: kinds of collectives, and elements sent."""
    _, program, traced = run(context, layout, layout)
    ops = COLLECTIVE.findall(program)
    cp, tp = (getattr(Layout.parse(layout), axis) for axis in ("cp", "tp"))
    if context == "ring" and cp > 2:
        ops = [(f"f32[{size}]", "collective-permute") for size in permuted(traced)]
    kinds = {
        "gather": {"all-gather": 2, "reduce-scatter": 2},
        "ring": {"collective-permute": 4 * (cp - 1)},
        "ulysses": {"all-to-all": 4},
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
    lengths = []
    jax.eval_shape(
        lambda: lengths.extend(x.zigzag.num_tokens for x in batches(mesh_of(layout)).values())
    )
    tokens = sum(lengths)
    keys, queries = (heads // tp * (HEAD_DIM + V_HEAD_DIM) for heads in (KV_HEADS, HEADS))
    forward = tokens * (cp - 1) / cp * ((queries + keys) / cp if context == "ulysses" else keys)
    config = replace(network(Execution(context=context)), head_dim=HEAD_DIM)
    both = (HEAD_DIM + V_HEAD_DIM) / (2 * HEAD_DIM)  # `received` knows heads of one width
    assert received(config, mesh_of(layout)) * tokens / cp * both == forward
    # A ring's keys and values go round twice, and their gradients once.
    assert total == (3 if context == "ring" else 2) * forward


def traded(jaxpr):
    """The elements of every all-to-all of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_to_all":
            yield equation.outvars[0].aval.size
        for inner in jaxprs_in_params(equation.params):
            yield from traded(inner)


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "copies"),
    full_but([(4, 2, 2), (4, 1, 4), (4, 6, 2), (2, 3, 2), (4, 4, 1)], (4, 1, 4), (4, 4, 1)),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ulysses_repeats_heads_as_often_as_needed(ranks, kv_heads, copies, dtype):
    """Values, gradients and what is sent where ``cp`` does not divide the key/value heads."""
    heads, time, width, v_width = 12, 8, 6, 10
    draw = np.random.default_rng(kv_heads)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width)]
    given = [draw.normal(size=(time, *size)).astype(dtype) for size in sizes]

    def read(layout, context):
        mesh = mesh_of(layout)

        def local(query, key, value, weight):
            execution = Execution(context=context, attention="plain")
            config = network(execution, heads, kv_heads)
            packed = pack_rows(jnp.zeros((1, time), int), jnp.ones((1, time), bool), mesh, config)
            assert packed.zigzag.contiguous == (context == "ulysses")
            own = (own_shard(packed.zigzag.flatten(x[None]), mesh.cp) for x in (query, key, value))
            out, back = jax.vjp(packed.core_attention_of_layer(0), *own)
            grads = back(own_shard(packed.zigzag.flatten(weight[None]), mesh.cp))
            whole = (join_shards(x.astype(jnp.float32), mesh.cp) for x in (out, *grads))
            return [packed.zigzag.restore(x)[0][0] for x in whole]

        traced = on_mesh(local, mesh, (P(),) * 4, P()).trace(*given)
        return traced.lower().compile()(*given), list(traded(traced.jaxpr.jaxpr))

    found, sent = read(f"cp{ranks}", "ulysses")
    own = time // ranks
    there = own * (heads * width + kv_heads * copies * (width + v_width))
    back = own * heads * v_width
    assert sorted(sent) == sorted([there, back] * 2)
    # Parts of sums in float32; gradients of bfloat16 copies are rounded before they are added up.
    tolerance = {"float32": 2e-6, "bfloat16": 0.02}[dtype]
    for got, wanted in zip(found, read("dp1", None)[0], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=4 * tolerance)


def traced_cost(context, ranks, time, heads, dtype, remat="none", window=None):
    """Elements of the largest array that a device computes in a forward and backward pass over one
    row, and the bytes it keeps between them. `heads`: of queries, of keys, width."""
    mesh, kept = fold_abstract(Layout(cp=ranks)), []
    num_heads, kv_heads, width = heads

    def local(query, key, value):
        config = network(Execution(context=context), num_heads, kv_heads)
        packed = pack_rows(jnp.zeros((1, time), int), jnp.ones((1, time), bool), mesh, config)
        attend = rematerialised(packed.core_attention_of_layer(0, window), remat)
        out, pull = jax.vjp(attend, query, key, value)
        kept.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)))
        return pull(out)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    shapes = [(time, n, width) for n in (num_heads, kv_heads, kv_heads)]
    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    program = jax.jit(step).trace(*arrays).jaxpr.jaxpr
    (body,) = (eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map")
    return max(array_sizes(body)), kept[0]


def test_a_ring_leaves_out_what_is_hidden():
    """Keys and values that are NaN reach whoever computes with them, masked or not."""
    mesh, chunk, time = mesh_of("cp4"), 4, 32
    draw = np.random.default_rng(0)
    given = [draw.normal(size=(time, n, 6)).astype(np.float32) for n in (4, 2, 2)]

    def finite_chunks(window, poisoned):
        """The chunks, in the order of columns, whose queries get something finite."""
        config = network(Execution(context="ring"), 4, 2)
        bad = np.isin(np.arange(time) // chunk, poisoned)[:, None, None]
        query, *sources = given
        whole = [query, *(np.where(bad, np.float32(np.nan), x) for x in sources)]

        def read(*whole):
            packed = pack_rows(jnp.zeros((1, time), int), jnp.ones((1, time), bool), mesh, config)
            own = (own_shard(packed.zigzag.flatten(x[None]), mesh.cp) for x in whole)
            out = packed.core_attention_of_layer(0, window)(*own)
            return packed.zigzag.restore(join_shards(out, mesh.cp))[0]

        out = on_mesh(read, mesh, (P(),) * 3, P())(*whole)
        finite = np.isfinite(np.asarray(out)).all(axis=(0, 2, 3)).reshape(-1, chunk)
        return set(np.flatnonzero(finite.all(axis=1)))

    # A rank has a chunk from either end: chunk 6 is on the rank of chunk 1, which is its own.
    assert finite_chunks(None, [6]) == {0, 2, 3, 4, 5}
    # Chunk 4 meets the keys of its rank's other chunk, 3, which looks back to 2; 1 and 7 meet none.
    assert finite_chunks(3, [2, 5]) == {0, 1, 7}


KEPT = [("none", 2), ("none", 8), ("full", 8)]


@pytest.mark.parametrize(("remat", "ranks"), full_but(KEPT, KEPT[0]))
def test_what_a_ring_keeps_is_linear_in_tokens(remat, ranks):
    """Its own part of everything, whatever the number of ranks, and no score."""

    def kept(time, ranks):
        return traced_cost("ring", ranks, time, (6, 3, 10), jnp.float32, remat)[1]

    # A rank's queries, keys, values and results, a number per query and the marks of all tokens.
    own = 16 * 4 * ((6 + 3 + 3 + 6) * 10 + 6)
    assert kept(16 * ranks, ranks) == own + 16 * ranks * 3 * 4
    assert kept(32 * ranks, ranks) == 2 * own + 32 * ranks * 3 * 4


@pytest.mark.slow
def test_128k_tokens_fit_on_eight_devices():
    """Attention of Qwen3-235B-A22B: 64 heads, 4 of keys and values, 128 wide, in bfloat16."""
    largest, kept = traced_cost("ring", 8, 131072, (64, 4, 128), jnp.bfloat16, "full")
    own = 131072 // 8
    # 256 MiB each of queries and results, 32 of keys and values, 4 of log-sums, 1.5 of marks.
    assert kept == own * (2 * (64 + 4 + 4 + 64) * 128 + 4 * 64) + 131072 * 12
    assert kept < 550 * 2**20
    # Blocks of scores are smaller than the queries.
    assert largest == own * 64 * 128


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "used"),
    [
        (2, 16, 8, "all_gather"),
        (4, 24, 8, "all_gather"),  # as many elements either way
        (4, 16, 8, "all_to_all"),
        (8, 16, 4, "all_to_all"),  # key/value heads are sent twice
        (8, 24, 4, "all_gather"),  # with which it is as many elements either way
        (8, 12, 4, "all_gather"),  # query heads cannot be cut
    ],
)
def test_none_sends_least(cp, heads, kv_heads, used):
    """Ulysses trades queries and what is read too: it wins from ``heads / kv_heads + 1`` ranks."""
    mesh, config = fold_abstract(Layout(cp=cp)), network(None, heads, kv_heads)

    def local(query, key):
        packed = pack_rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), mesh, config)
        # Whole sequences are equal work in any order; all else is in zig-zag.
        assert packed.zigzag.contiguous == (used == "all_to_all")
        return packed.core_attention_of_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    trace = jax.jit(step).trace(jnp.zeros((16, heads, 4)), jnp.zeros((16, kv_heads, 4)))
    assert set(re.findall(r"\b(all_gather|all_to_all|ppermute)\b", str(trace.jaxpr))) == {used}


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (Execution(context="ulysses"), r"the 6 query heads of a tp rank over cp=4, which must di"),
        (Execution(context="star"), r"context='star' is not known: choose among gather, ring, uly"),
        (
            Execution(context="ring", attention="xla"),
            r"ring\" works in blocks and cannot use execution.attention='xla': choose context=",
        ),
        (Execution(context="gather", attention="cudnn"), r"it runs on NVIDIA GPUs"),
    ],
)
def test_what_cannot_serve_is_refused(execution, message):
    mesh = fold_abstract(Layout(cp=4))

    def local(query, key):
        config = network(execution, 6, 2)
        packed = pack_rows(jnp.zeros((1, 8), int), jnp.ones((1, 8), bool), mesh, config)
        return packed.core_attention_of_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, jnp.zeros((8, 6, 6)), jnp.zeros((8, 2, 6)))
