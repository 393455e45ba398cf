"""Experts in chunks of tokens: what they give, what they send, and that nothing orders them."""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_graph import Graph
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from references import dense_reference
from tiers import full_but

from moe.execution import Execution
from moe.experts.dispatch.choice import chunk_sizes, dispatch
from moe.remat import rematerialise
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum

TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 48, 8, 3, 6, 10


def weights():
    draw = np.random.default_rng(0)
    shapes = (D_MODEL, ROUTE), (ROUTE, D_MODEL, 2, D_EXPERT), (ROUTE, D_EXPERT, D_MODEL)
    return Experts(*(np.asarray(draw.normal(size=shape) / 2, np.float32) for shape in shapes))


def tokens():
    return np.random.default_rng(1).normal(size=(TOKENS, D_MODEL)).astype(np.float32)


def routing():
    draw = np.random.default_rng(7)
    experts = np.stack([draw.permutation(ROUTE)[:CHOSEN] for _ in range(TOKENS)])
    experts[draw.random(TOKENS) < 0.2] = ROUTE
    probs = np.where(experts < ROUTE, draw.random(experts.shape), 0.0)
    return Routing(experts.astype(np.int32), probs.astype(np.float32))


def forward(mesh, remat="none", product=None, capacity=None, **execution):
    """(experts, tokens, routing) -> sums, and what found no room on all devices."""
    options = {"execution": Execution(**execution), "product": product, "capacity": capacity}
    spec = Experts(P(), P(mesh.ep, None, None, mesh.etp), P(mesh.ep, mesh.etp))

    def local(weights, x, routing):
        send = rematerialise(partial(dispatch, mesh=mesh, **options), remat)
        out, overflow = send(weights, x, routing)
        return out, all_sum(overflow, mesh.axes)

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.axes), P(mesh.axes)),
        out_specs=(P(mesh.axes), P()),
    )


def on(mesh, remat="none", **options):
    """(experts, tokens, routing) -> sums, gradients, and what found no room on all devices."""
    sharded = forward(mesh, remat, **options)

    return jit(partial(pulled, sharded))


def pulled(function, weights, x, routing):
    """Sums, their gradients under an uneven pull, and what `function` gives beside them."""

    def of(weights, x, probs):
        return function(weights, x, routing._replace(probs=probs))

    out, pull, beside = jax.vjp(of, weights, x, routing.probs, has_aux=True)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return out, pull(cotangent.astype(out.dtype)), beside


@jit
def reference(weights, x, routing):
    """The same of the plain twin."""
    return pulled(lambda w, x, r: (dense_reference(w, x, *r), None), weights, x, routing)


CHUNKS = 3


@functools.cache
def compiled(name, remat, product, chunks, layout="dp4 / ep4"):
    program = on(mesh_of(layout), remat, dispatch=name, product=product, expert_chunks=chunks)
    return program.lower(weights(), tokens(), routing()).compile()


@functools.cache
def graph(*which):
    return Graph.of(compiled(*which).as_text())


@pytest.mark.parametrize(
    ("num_tokens", "chunks", "expected"),
    [(12, 1, [12]), (12, 4, [3, 3, 3, 3]), (11, 4, [3, 3, 3, 2]), (3, 5, [1, 1, 1]), (0, 2, [0])],
)
def test_chunks_are_equal_but_for_one_token_and_none_is_empty(num_tokens, chunks, expected):
    assert chunk_sizes(num_tokens, chunks) == expected


def same(found, given):
    """Sums and gradients equal all tokens at once on one device, and all found room."""
    (out, gradients, overflow), expected = jax.device_get((found, reference(*given)))
    assert overflow == 0
    # A row is multiplied in a tile of other rows: a few units in the seventh digit.
    np.testing.assert_allclose(out, expected[0], atol=5e-6)
    # No gradient is asked of a choice of nobody.
    sent = given[2].experts < ROUTE
    gradients, expected_gradients = ((*g[:2], g[2][sent]) for g in (gradients, expected[1]))
    # float32 sums of two dozen rows, in parts.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5),
        gradients,
        expected_gradients,
    )
    assert all(np.max(np.abs(g)) > 0 for g in (gradients[0].gate_up, gradients[0].down))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(["all_to_all", "all_gather"], "all_to_all"))
def test_expert_chunks_equal_one_chunk(name):
    given = weights(), tokens(), routing()
    same(compiled(name, "none", "plain", CHUNKS)(*given), given)


# Ten tokens a device, in chunks of 4, 3, 3, or five, in chunks of 3 and 2.
UNEVEN = [
    ("all_to_all", None, "dp1", 3),
    ("all_to_all", "plain", "tp2 dp4 / ep2 etp2", 2),
    ("all_gather", "plain", "tp2 dp2 / ep4", 3),
    ("all_gather", None, "dp4 / ep2 etp2", 3),
    ("ragged", "plain", "dp4 / ep4", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "product", "layout", "chunks"), UNEVEN)
def test_uneven_chunks_do_on_every_mesh(name, product, layout, chunks, emulated):
    given = weights(), tokens()[:40], Routing(*(array[:40] for array in routing()))
    program = on(mesh_of(layout), dispatch=name, product=product, expert_chunks=chunks)
    same(program(*given), given)


@pytest.mark.slow
def test_a_capacity_holds_for_all_chunks_together():
    """The choices that an expert takes of a device may all be in one chunk, of 4 tokens or 3."""
    mesh = mesh_of("dp2 / ep2")
    experts = np.full((14, CHOSEN), ROUTE)
    # The first two of each device's seven tokens.
    experts[np.arange(14) % 7 < 2] = [0, 1, 5]
    probs = np.where(experts < ROUTE, np.random.default_rng(2).random(experts.shape), 0.0)
    given = Routing(experts.astype(np.int32), probs.astype(np.float32))
    program = forward(mesh, dispatch="all_to_all", product="plain", capacity=2, expert_chunks=2)
    out, overflow = jit(program)(weights(), tokens()[:14], given)
    assert overflow == 0
    expected, *_ = reference(weights(), tokens()[:14], given)
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.slow
def test_chunk_overflow_is_counted():
    """Even routing of the whole, uneven of each chunk: every chunk wants all of one device."""
    mesh = mesh_of("dp2 / ep2")
    experts = np.where(np.arange(TOKENS)[:, None] % 24 < 12, [[0, 1, 2]], [[4, 5, 6]])
    given = Routing(experts.astype(np.int32), np.ones(experts.shape, np.float32))
    options = {"dispatch": "all_gather", "product": "plain", "buffer_factor": 1.0}
    programs = (jit(forward(mesh, expert_chunks=chunks, **options)) for chunks in (1, 2))
    found = [program(weights(), tokens(), given) for program in programs]
    # 72 choices of each device, 96 rows of room; of a chunk 72 come to one, which has 64.
    assert [int(overflow) for _, overflow in found] == [0, 16]


STRUCTURE = [
    ("all_to_all", "none", "plain"),
    ("all_gather", "none", "plain"),
    ("all_to_all", "selective", "plain"),
    ("all_gather", "selective", "plain"),
    ("all_to_all", "none", None),
]


def chunk_of(scope):
    found = set(re.findall(r"\bexpert_chunk_(\d+)\b", scope))
    return int(found.pop()) if len(found) == 1 else None


def is_backward(scope):
    return "transpose(" in scope


@pytest.mark.slow
@pytest.mark.parametrize(("name", "remat", "product"), STRUCTURE)
def test_nothing_orders_two_chunks(name, remat, product):
    """Neither the collectives of one and the products of another nor their collectives wait for
    each other, forward and backward; within one chunk they do."""
    found = graph(name, remat, product, CHUNKS)
    collectives = [x for x in found.collectives() if chunk_of(x.scope) is not None]
    products = [(x, scope) for x, scope in found.products() if chunk_of(scope) is not None]
    for backward in (False, True):
        sent = [x for x in collectives if is_backward(x.scope) is backward]
        multiplied = [(x, scope) for x, scope in products if is_backward(scope) is backward]
        for chunks in ([chunk_of(x.scope) for x in sent], [chunk_of(s) for _, s in multiplied]):
            assert set(chunks) == set(range(CHUNKS))
        pairs = [
            (a, chunk_of(a.scope), b, chunk_of(scope)) for a in sent for b, scope in multiplied
        ]
        pairs += [(a, chunk_of(a.scope), b, chunk_of(b.scope)) for a in sent for b in sent]
        for a, own, b, other in pairs:
            if own != other:
                assert found.unordered(a, b), (a.name, b.name)
        # The graph says something: a chunk's dispatch precedes its products, and these its combine.
        for chunk in range(CHUNKS):
            own = [a.name for a in sent if chunk_of(a.scope) == chunk]
            before = [found.before(b.name) for b, scope in multiplied if chunk_of(scope) == chunk]
            assert any(a in names for a in own for names in before)
            first = [b.name for b, scope in multiplied if chunk_of(scope) == chunk]
            assert any(b in found.before(a) for a in own for b in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_chunks_are_so_many_times_as_many_collectives_of_so_small_a_part(name):
    def sent(chunks):
        # Between devices: the compiler keeps sums over a group of one.
        collectives = graph(name, "none", "plain", chunks).collectives()
        return [(x.kind, x.num_elements) for x in collectives if x.kind != "all-reduce"]

    at_once = sent(1)
    assert len(at_once) >= 7
    expected = [(kind, size // CHUNKS) for kind, size in at_once for _ in range(CHUNKS)]
    assert all(size % CHUNKS == 0 for _, size in at_once)
    assert sorted(sent(CHUNKS)) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_each_chunk_is_sent_again_by_itself_for_the_backward_pass(name):
    """By tracing: what is sent twice is an input here, which the compiler sees to be the same."""

    def sent(remat, chunks):
        options = {"dispatch": name, "product": "plain", "expert_chunks": chunks}
        program = on(mesh_of("dp4 / ep4"), remat, **options)
        return program.lower(weights(), tokens(), routing()).as_text().count(f"stablehlo.{name}")

    once = sent("none", 1)
    # Tokens, ids and probs.
    assert sent("selective", CHUNKS) == CHUNKS * (once + 3)


@pytest.mark.slow
def test_the_gradient_of_the_weights_is_summed_over_devices_once():
    """Experts of which there are two copies."""

    def reduced(chunks):
        collectives = graph("all_gather", "none", "plain", chunks, "dp4 / ep2").collectives()
        sums = [x.num_elements for x in collectives if x.kind == "all-reduce"]
        return sum(size for size in sums if size > 1)

    matrices = weights()
    assert reduced(1) == reduced(CHUNKS) == (matrices.gate_up.size + matrices.down.size) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "expected"), [(1, "all_to_all"), (2, "all_gather")])
def test_default_dispatch_moves_least_of_chunk(chunks, expected):
    """Of six tokens a capacity of 2 lets a third through to a peer with one expert; of three, two
    thirds."""
    program = jit(forward(mesh_of("dp8 / ep8"), capacity=2, expert_chunks=chunks))
    text = program.lower(weights(), tokens(), routing()).as_text()
    others = {"all_to_all", "all_gather"} - {expected}
    assert f"stablehlo.{expected}" in text
    assert not any(f"stablehlo.{name}" in text for name in others)


def test_no_chunk_is_refused():
    with pytest.raises(ValueError, match=r"expert_chunks=0 must be at least 1"):
        Execution(expert_chunks=0)
