"""Experts in chunks of tokens: what they give, what they send, and that nothing orders them."""

import functools
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_graph import Graph
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from ragged import ragged_by_gathering
from tiers import full_but

from moe.execution import Execution
from moe.experts.dispatch import choice as dispatching
from moe.experts.dispatch import ragged as ragged_dispatcher
from moe.experts.dispatch.choice import best, dispatch
from moe.experts.dispatch.token_chunks import chunk_sizes
from moe.experts.feed_forward import dense_reference
from moe.remat import rematerialised
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract

TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 48, 8, 3, 6, 10


def weights(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    shapes = (D_MODEL, ROUTE), (ROUTE, D_MODEL, 2, D_EXPERT), (ROUTE, D_EXPERT, D_MODEL)
    return Experts(*(jnp.asarray(draw.normal(size=shape) / 2, dtype) for shape in shapes))


def tokens(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, D_MODEL)), dtype)


def routing():
    draw = np.random.default_rng(7)
    experts = np.stack([draw.permutation(ROUTE)[:CHOSEN] for _ in range(TOKENS)])
    experts[draw.random(TOKENS) < 0.2] = ROUTE
    probs = np.where(experts < ROUTE, draw.random(experts.shape), 0.0)
    return Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(probs, jnp.float32))


def on(mesh, remat="none", **options):
    """(experts, tokens, routing) -> sums, gradients, and what found no room on all devices."""
    spec = Experts(P(), P(mesh.ep, None, None, mesh.etp), P(mesh.ep, mesh.etp))

    def local(weights, x, routing):
        send = rematerialised(partial(dispatch, mesh=mesh, **options), remat)
        out, overflow = send(weights, x, routing)
        return out, all_sum(overflow, mesh.axes)

    sharded = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.axes), P(mesh.axes)),
        out_specs=(P(mesh.axes), P()),
    )

    def pulled(weights, x, routing):
        def of(weights, x, probs):
            return sharded(weights, x, routing._replace(probs=probs))

        out, pull, overflow = jax.vjp(of, weights, x, routing.probs, has_aux=True)
        cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, pull(cotangent.astype(out.dtype)), overflow

    return jit(pulled)


@functools.cache
def at_once(layout, name):
    return on(mesh_of(layout), implementation=name)(weights(), tokens(), routing())


@pytest.fixture
def emulated(monkeypatch):
    """CPU devices that have a ragged all-to-all."""
    monkeypatch.setattr(ragged_dispatcher.lax, "ragged_all_to_all", ragged_by_gathering)
    monkeypatch.setattr(dispatching, "_refuse_cpu", lambda mesh: None)


@pytest.mark.parametrize(
    ("num_tokens", "chunks", "expected"),
    [(12, 1, [12]), (12, 4, [3, 3, 3, 3]), (11, 4, [3, 3, 3, 2]), (3, 5, [1, 1, 1]), (0, 2, [0])],
)
def test_chunks_are_equal_but_for_one_token_and_none_is_empty(num_tokens, chunks, expected):
    assert chunk_sizes(num_tokens, chunks) == expected


# Twelve tokens a device, in chunks of 3 and of 3, 3, 2, 2, 2.
CASES = [
    ("all_to_all", "dp4 / ep4", 5),
    ("all_to_all", "dp1", 4),
    ("all_to_all", "tp2 dp4 / ep2 etp2", 4),
    ("all_gather", "tp2 dp2 / ep4", 4),
    ("all_gather", "dp4 / ep2 etp2", 5),
    ("ragged", "dp4 / ep4", 5),
]


@pytest.mark.parametrize(("name", "layout", "chunks"), full_but(CASES, CASES[0], CASES[3]))
def test_chunks_give_what_all_tokens_at_once_give(name, layout, chunks, emulated):
    program = on(mesh_of(layout), implementation=name, chunks=chunks)
    out, gradients, overflow = program(weights(), tokens(), routing())
    expected, expected_gradients, _ = at_once(layout, name)
    assert overflow == 0
    # A row is multiplied in a tile of other rows: a few units in the seventh digit.
    np.testing.assert_allclose(out, expected, atol=3e-6)
    # float32 sums of two dozen rows, in parts.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5),
        gradients,
        expected_gradients,
    )
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in (gradients[0].gate_up, gradients[0].down))
    oracle = dense_reference(weights(), tokens(), *routing())
    np.testing.assert_allclose(out, oracle, atol=5e-6)


def test_gradients_of_half_precision_weights_are_added_up_before_they_are_rounded():
    """To the gradient of all tokens at once as near as a rounding of each part and of their sum."""
    mesh = mesh_of("dp1")
    given = weights(jnp.bfloat16), tokens(jnp.bfloat16), routing()
    (_, parts, _), (_, whole, _) = (on(mesh, chunks=chunks)(*given) for chunks in (24, 1))
    for name in ("gate_up", "down"):
        a, b = (np.asarray(getattr(g[0], name), np.float64) for g in (parts, whole))
        error = np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2))
        # Roundings to 8 bits, uniform: 2^-9 / sqrt(3) of the largest of a binade, for the two sums;
        # and of the 24 parts, each a fifth as large as the sum. Added up in 8 bits it is 0.004.
        assert 0 < error < 2.0**-9, (name, error)


def test_a_capacity_holds_for_all_chunks_together():
    """The choices that an expert takes of a device may all be in one chunk."""
    mesh = mesh_of("dp4 / ep4")
    experts = np.full((TOKENS, CHOSEN), ROUTE)
    # Of each device's twelve tokens the first three: the whole first chunk.
    experts[np.arange(TOKENS) % 12 < 3] = [0, 1, 5]
    probs = np.where(experts < ROUTE, np.random.default_rng(2).random(experts.shape), 0.0)
    given = Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(probs, jnp.float32))
    program = on(mesh, implementation="all_to_all", capacity=3, chunks=4)
    out, _, overflow = program(weights(), tokens(), given)
    assert overflow == 0
    np.testing.assert_allclose(out, dense_reference(weights(), tokens(), *given), atol=5e-6)


def test_what_a_chunk_has_no_room_for_is_counted():
    """Even routing of the whole, uneven of each chunk: every chunk wants all of one device."""
    mesh = mesh_of("dp2 / ep2")
    experts = np.where(np.arange(TOKENS)[:, None] % 24 < 12, [[0, 1, 2]], [[4, 5, 6]])
    probs = jnp.ones(experts.shape, jnp.float32)
    given = Routing(jnp.asarray(experts, jnp.int32), probs)
    found = [
        on(mesh, implementation="all_gather", buffer_factor=1.0, chunks=chunks)(
            weights(), tokens(), given
        )
        for chunks in (1, 2)
    ]
    # 72 choices of each device, 96 rows of room; of a chunk 72 come to one, which has 64.
    assert [int(overflow) for *_, overflow in found] == [0, 16]


STRUCTURE = [
    ("all_to_all", "none", "plain"),
    ("all_gather", "none", "plain"),
    ("all_to_all", "selective", "plain"),
    ("all_gather", "selective", "plain"),
    ("all_to_all", "none", None),
]
CHUNKS = 3


@functools.cache
def graph(name, remat, product, chunks, layout="dp4 / ep4"):
    program = on(mesh_of(layout), remat, implementation=name, product=product, chunks=chunks)
    return Graph.of(program.lower(weights(), tokens(), routing()).compile().as_text())


def chunk_of(scope):
    found = [chunk for chunk in range(CHUNKS) if f"expert_chunk_{chunk}/" in scope]
    return found[0] if len(found) == 1 else None


def is_backward(scope):
    return "transpose(" in scope


@pytest.mark.parametrize(("name", "remat", "product"), full_but(STRUCTURE, *STRUCTURE[:2]))
def test_nothing_orders_two_chunks(name, remat, product):
    """Neither the collectives of one and the products of another nor their collectives wait for
    each other, forward and backward; those of one chunk do."""
    found = graph(name, remat, product, CHUNKS)
    collectives = [x for x in found.collectives() if chunk_of(x.scope) is not None]
    products = [(x, scope) for x, scope in found.products() if chunk_of(scope) is not None]
    for backward in (False, True):
        sent = [x for x in collectives if is_backward(x.scope) is backward]
        multiplied = [(x, scope) for x, scope in products if is_backward(scope) is backward]
        for chunks in ([chunk_of(x.scope) for x in sent], [chunk_of(s) for _, s in multiplied]):
            assert set(chunks) == set(range(CHUNKS))
        pairs = [(a, chunk_of(a.scope), b, chunk_of(scope)) for a in sent for b, scope in multiplied]
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


@pytest.mark.parametrize(("name", "remat", "product"), full_but(STRUCTURE, *STRUCTURE[:2]))
def test_chunks_are_so_many_times_as_many_collectives_of_so_small_a_part(name, remat, product):
    def sent(chunks):
        # Between devices: the compiler keeps sums over a group of one.
        collectives = graph(name, remat, product, chunks).collectives()
        return [(x.kind, x.num_elements) for x in collectives if x.kind != "all-reduce"]

    at_once = sent(1)
    assert len(at_once) >= 7
    expected = [(kind, size // CHUNKS) for kind, size in at_once for _ in range(CHUNKS)]
    assert all(size % CHUNKS == 0 for _, size in at_once)
    assert sorted(sent(CHUNKS)) == sorted(expected)


def test_the_gradient_of_the_weights_is_summed_over_devices_once():
    """Experts of which there are two copies."""

    def reduced(chunks):
        collectives = graph("all_gather", "none", "plain", chunks, "dp4 / ep2").collectives()
        sums = [x.num_elements for x in collectives if x.kind == "all-reduce"]
        return sum(size for size in sums if size > 1)

    matrices = weights()
    assert reduced(1) == reduced(CHUNKS) == (matrices.gate_up.size + matrices.down.size) // 2


def test_none_picks_what_moves_less_of_a_chunk():
    mesh = fold_abstract(Layout.parse("dp8 / ep8"))
    # Of a hundred tokens a capacity of 13 lets 52 through to a peer, of a quarter of them all.
    assert best(100, 4, 4, mesh, 13) == "all_to_all"
    picked = []
    with pytest.MonkeyPatch.context() as patch:
        for name, implementation in dispatching.IMPLEMENTATIONS.items():

            def noting(*given, name=name, implementation=implementation, **options):
                picked.append(name)
                return implementation(*given, **options)

            patch.setitem(dispatching.IMPLEMENTATIONS, name, noting)
        for chunks in (1, 4):
            real = mesh_of("dp8 / ep8")
            spec = Experts(P(), P(real.ep), P(real.ep))
            x = jax.ShapeDtypeStruct((800, D_MODEL), jnp.float32)
            routed = Routing(
                *(jax.ShapeDtypeStruct((800, 4), kind) for kind in (jnp.int32, jnp.float32))
            )
            wide = Experts(
                *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 32), (32, 6, 2, 10), (32, 10, 6)))
            )
            jax.eval_shape(
                jax.shard_map(
                    lambda *given, chunks=chunks: dispatch(
                        *given, real, capacity=13, chunks=chunks
                    )[0],
                    mesh=real.mesh,
                    in_specs=(spec, P(real.axes), P(real.axes)),
                    out_specs=P(real.axes),
                ),
                wide,
                x,
                routed,
            )
    assert picked == ["all_to_all", *["all_gather"] * 4]


def test_no_chunk_is_refused():
    assert list(pairwise([Execution().expert_chunks, 1])) == [(1, 1)]
    with pytest.raises(ValueError, match=r"expert_chunks=0 sends no token to an expert: use 1"):
        Execution(expert_chunks=0)
