"""Attention across cp, way by way: what each sends, keeps and leaves out, and which is taken."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import array_sizes, mesh_of, on_mesh
from tiers import full_but

from moe.attention.context_parallel import context_of
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.remat import rematerialise
from moe.tokens.packing import pack_rows
from sharding.collectives import join_shards, local_shard
from sharding.folding import Layout, fold_abstract


def network(heads, kv_heads, execution=None):
    """A network with such heads, as far as attention and the order of tokens know of it."""
    execution = Execution() if execution is None else execution
    return ModelConfig(vocab_size=2, num_heads=heads, num_kv_heads=kv_heads, execution=execution)


def traded(jaxpr):
    """The elements of every all-to-all of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_to_all":
            yield equation.outvars[0].aval.size
        for inner in jaxprs_in_params(equation.params):
            yield from traded(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kv_heads", "copies"),
    full_but([(4, 2, 2), (4, 1, 4), (4, 6, 2), (2, 3, 2), (4, 4, 1)], (4, 1, 4), (4, 4, 1)),
)
@pytest.mark.parametrize("dtype", full_but(["float32", "bfloat16"], "bfloat16"))
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
            config = network(heads, kv_heads, execution)
            packed = pack_rows(
                jnp.zeros((1, time), int), jnp.ones((1, time), bool), Model(config, mesh)
            )
            assert packed.zigzag.contiguous == (context == "ulysses")
            own = (
                local_shard(packed.zigzag.flatten(x[None]), mesh.cp) for x in (query, key, value)
            )
            out, back = jax.vjp(packed.core_attention_of_layer(0), *own)
            grads = back(local_shard(packed.zigzag.flatten(weight[None]), mesh.cp))
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
    chex.assert_trees_all_close(found, read("dp1", None)[0], rtol=tolerance, atol=4 * tolerance)


def traced_cost(context, ranks, time, heads, dtype, remat="none", window=None):
    """Elements of the largest array that a device computes in a forward and backward pass over one
    row, and the bytes it keeps between them. `heads`: of queries, of keys, width."""
    mesh, kept = fold_abstract(Layout(cp=ranks)), []
    num_heads, kv_heads, width = heads

    def local(query, key, value):
        config = network(num_heads, kv_heads, Execution(context=context))
        packed = pack_rows(
            jnp.zeros((1, time), int), jnp.ones((1, time), bool), Model(config, mesh)
        )
        attend = rematerialise(packed.core_attention_of_layer(0, window), remat)
        out, pull = jax.vjp(attend, query, key, value)
        kept.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)))
        return pull(out)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    shapes = [(time, n, width) for n in (num_heads, kv_heads, kv_heads)]
    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    program = jax.jit(step).trace(*arrays).jaxpr.jaxpr
    (body,) = (eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map")
    return max(array_sizes(body)), kept[0]


@pytest.mark.slow
def test_ring_skips_hidden_blocks():
    """Keys and values that are NaN reach whoever computes with them, masked or not."""
    mesh, chunk, time = mesh_of("cp4"), 4, 32
    draw = np.random.default_rng(0)
    given = [draw.normal(size=(time, n, 6)).astype(np.float32) for n in (4, 2, 2)]

    def finite_chunks(window, poisoned):
        """The chunks, in the order of columns, whose queries get something finite."""
        config = network(4, 2, Execution(context="ring"))
        bad = np.isin(np.arange(time) // chunk, poisoned)[:, None, None]
        query, *sources = given
        whole = [query, *(np.where(bad, np.float32(np.nan), x) for x in sources)]

        def read(*whole):
            packed = pack_rows(
                jnp.zeros((1, time), int), jnp.ones((1, time), bool), Model(config, mesh)
            )
            own = (local_shard(packed.zigzag.flatten(x[None]), mesh.cp) for x in whole)
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


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "ranks"), full_but(KEPT, KEPT[0]))
def test_ring_residuals_are_linear_in_tokens(remat, ranks):
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
    mesh, config = fold_abstract(Layout(cp=cp)), network(heads, kv_heads)

    def local(query, key):
        packed = pack_rows(jnp.zeros((1, 16), int), jnp.ones((1, 16), bool), Model(config, mesh))
        # Whole sequences are equal work in any order; all else is in zig-zag.
        assert packed.zigzag.contiguous == (used == "all_to_all")
        return packed.core_attention_of_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    trace = jax.jit(step).trace(jnp.zeros((16, heads, 4)), jnp.zeros((16, kv_heads, 4)))
    assert set(re.findall(r"\b(all_gather|all_to_all|ppermute)\b", str(trace.jaxpr))) == {used}


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ({"context": "ulysses"}, r"the 6 query heads of a tp rank over cp=4, which must di"),
        ({"context": "star"}, r"context='star' is not known: choose among gather, ring, uly"),
        (
            {"context": "ring", "attention": "xla"},
            r"ring\" needs blockwise attention, not execution.attention='xla': choose context=",
        ),
        ({"context": "gather", "attention": "cudnn"}, r"it runs on NVIDIA GPUs"),
    ],
)
@unchecked()
def test_context_rejects_unsupported_method(execution, message):
    mesh = fold_abstract(Layout(cp=4))

    def local(query, key):
        config = network(6, 2, Execution(**execution))
        packed = pack_rows(jnp.zeros((1, 8), int), jnp.ones((1, 8), bool), Model(config, mesh))
        return packed.core_attention_of_layer(0)(query, key, key)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, jnp.zeros((8, 6, 6)), jnp.zeros((8, 2, 6)))


def test_a_version_of_jax_that_crashes_is_refused(monkeypatch):
    config = network(6, 2, Execution(context="ring"))
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    assert context_of(Model(config, fold_abstract(Layout(cp=2)))) == "ring"
    with pytest.raises(ValueError, match=r"\(pp=2\) crashes the compiler of JAX 0.11.2: install"):
        context_of(Model(config, fold_abstract(Layout(cp=2, pp=2))))
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    assert context_of(Model(config, fold_abstract(Layout(cp=2, pp=2)))) == "ring"
