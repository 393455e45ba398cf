"""Attention across cp reads what one device reads: values, gradients, and what it sends."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh
from tiers import full_but

from moe.attention.context_parallel import received_elements
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.tokens.packing import pack_rows, pack_segments, pack_shared_prompts
from sharding.collectives import join_shards, local_shard
from sharding.folding import Layout

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


def network(execution):
    """A network with such heads, as far as attention and the order of tokens know of it."""
    return ModelConfig(vocab_size=2, num_heads=HEADS, num_kv_heads=KV_HEADS, execution=execution)


KINDS = ["rows", "shared prompts", "packed"]


def batches(mesh, config):
    model = Model(config, mesh)
    tokens, valid = jnp.zeros((BATCH, TIME), int), jnp.asarray(valid_rows())
    return {
        "rows": pack_rows(tokens, valid, model),
        "shared prompts": pack_shared_prompts(tokens, valid, PROMPT, COPIES, model),
        "packed": pack_segments(tokens, jnp.asarray(segments()), 12 * BATCH, model),
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", full_but(WINDOWS, "tp2 cp2"))
def test_one_device_equals_float64_softmax(kind, windows):
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


@pytest.mark.slow
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
                Model(network(execution), mesh),
            )
            own = (local_shard(packed.zigzag.flatten(x), mesh.cp) for x in given)
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
# The whole network gathers in `tests/moe/test_mesh_parity.py`; `tests/moe/attention/test_sinks.py`
# has a ring.
QUICK = ["ulysses"]
KERNELS = ["gather blocked", "gather xla", "ulysses blocked", "ulysses xla"]


CASES = [
    *((context, layout) for context in CONTEXTS for layout in LAYOUTS),
    *((kernel, "tp2 cp2") for kernel in KERNELS),
]


@pytest.mark.parametrize("kind", full_but(KINDS, next(iter(KINDS))))
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
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-7, atol=2e-5)
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
def test_context_parallel_volume_is_as_documented(context, layout):
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
    lengths, in_zigzag = [], network(Execution(context="gather"))
    jax.eval_shape(
        lambda: lengths.extend(
            x.zigzag.num_tokens for x in batches(mesh_of(layout), in_zigzag).values()
        )
    )
    tokens = sum(lengths)
    keys, queries = (heads // tp * (HEAD_DIM + V_HEAD_DIM) for heads in (KV_HEADS, HEADS))
    forward = tokens * (cp - 1) / cp * ((queries + keys) / cp if context == "ulysses" else keys)
    config = replace(network(Execution(context=context)), head_dim=HEAD_DIM)
    both = (HEAD_DIM + V_HEAD_DIM) / (2 * HEAD_DIM)  # `received_elements` knows heads of one width
    assert received_elements(Model(config, mesh_of(layout))) * tokens / cp * both == forward
    # A ring's keys and values go round twice, and their gradients once.
    assert total == (3 if context == "ring" else 2) * forward
