"""Buffers of a multiple of what even routing sends: their sizes, and what finds no room in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from references import dense_reference
from tiers import full_but

from moe.execution import Execution
from moe.experts.dispatch.buffers import buffer_rows, peer_assignments, peer_tokens
from moe.experts.dispatch.choice import dispatch, rows_received
from moe.experts.dispatch.cost import TokenExchange, cheapest, peer_capacity_of
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.costs.transfer import ROW_TILE
from sharding.folding import Layout, fold_abstract

TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 64, 8, 3, 6, 4
NAMES = ["all_to_all", "all_gather", "ragged"]


@pytest.mark.parametrize(
    ("layout", "tokens", "k", "experts", "factor", "expected"),
    [
        # Qwen3-235B-A22B on eight devices: useful are 8,192 rows.
        ("dp8 / ep8", 1024, 8, 128, None, 65_536),
        ("dp8 / ep8", 1024, 8, 128, 1.0, 8_192),
        ("dp8 / ep8", 1024, 8, 128, 1.5, 12_288),
        # With the hidden units of two devices each, rows of both come to each.
        ("dp8 / ep4 etp2", 1024, 8, 128, 1.5, 24_576),
        # Never more than any routing needs.
        ("dp8 / ep8", 1024, 8, 128, 9.0, 65_536),
        ("dp1", 100, 2, 8, 1.0, 200),
        # Whole tiles: 1.1 x 100 x 2 = 220.
        ("dp4 / ep4", 100, 2, 8, 1.1, 224),
    ],
)
def test_rows_of_a_budget(layout, tokens, k, experts, factor, expected):
    mesh = fold_abstract(Layout.parse(layout))
    num_local = experts // mesh.size(mesh.ep)
    rows = buffer_rows(tokens, k, num_local, mesh, None, factor)
    assert rows == expected
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    assert rows % ROW_TILE == 0 or rows == devices * peer_assignments(tokens, k, num_local, None)
    assert peer_tokens(tokens, k, num_local, mesh, None, factor) == min(tokens, rows // devices)


def best(k, num_experts, mesh, buffer_factor=None):
    peer_capacity = peer_capacity_of(k, mesh.size(mesh.ep), None, buffer_factor)
    return cheapest(TokenExchange(num_experts, k, 64, 4, peer_capacity), mesh)


def test_a_budget_moves_less_where_a_token_goes_to_few_devices():
    mesh = fold_abstract(Layout.parse("dp8 / ep8"))
    # A buffer for 1.5 x 1024 x 2 rows has 384 tokens from each of eight.
    assert rows_received("all_to_all", 1024, 2, 16, mesh, None, 1.5) == 2 * 7 * 384
    assert best(2, 128, mesh, 1.5) == "all_to_all"
    assert best(8, 128, mesh, 1.5) == best(2, 128, mesh) == "all_gather"


@pytest.mark.parametrize(
    ("platform", "layout", "k", "expected"),
    [
        ("gpu", "dp8 / ep8", 2, "all_to_all"),
        ("gpu", "dp8 / ep4 etp2", 1, "all_to_all"),
        ("gpu", "dp8 / ep8", 8, "all_gather"),
        # Nothing is sent.
        ("gpu", "dp1", 8, "all_gather"),
        ("tpu", "dp8 / ep8", 8, "ragged"),
        ("tpu", "dp8 / ep4 etp2", 8, "ragged"),
    ],
)
def test_default_dispatcher_of_platform(platform, layout, k, expected):
    assert best(k, 128, fold_abstract(Layout.parse(layout), platform), 1.5) == expected


def weights():
    draw = np.random.default_rng(0)
    shapes = (D_MODEL, ROUTE), (ROUTE, D_MODEL, 2, D_EXPERT), (ROUTE, D_EXPERT, D_MODEL)
    return Experts(*(np.asarray(draw.normal(size=shape) / 2, np.float32) for shape in shapes))


def tokens():
    return np.random.default_rng(1).normal(size=(TOKENS, D_MODEL)).astype(np.float32)


def routing_of(kind):
    experts = {
        "even": (3 * np.arange(TOKENS)[:, None] + np.arange(CHOSEN)) % ROUTE,
        "all to the same": np.tile([1, 0, 2], (TOKENS, 1)),
    }[kind]
    probs = np.random.default_rng(2).random(experts.shape)
    return Routing(experts.astype(np.int32), probs.astype(np.float32))


def program(mesh, **execution):
    """Sums, gradients, and what found no room on all devices together."""
    spec = Experts(P(), P(mesh.ep, None, None, mesh.etp), P(mesh.ep, mesh.etp))

    def local(weights, x, routing):
        out, overflow = dispatch(weights, x, routing, mesh, Execution(**execution))
        return out, all_sum(overflow, mesh.axes)

    sharded = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.axes), P(mesh.axes)),
        out_specs=(P(mesh.axes), P()),
    )

    def pulled(weights, x, routing):
        (out, overflow), pull = jax.vjp(lambda w, x: sharded(w, x, routing), weights, x)
        cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, overflow, pull((cotangent, np.zeros((), jax.dtypes.float0)))

    return jit(pulled)


@jit
def oracle(weights, x, routing):
    """Sums and gradients of the plain twin."""
    out, pull = jax.vjp(lambda w, x: dense_reference(w, x, *routing), weights, x)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))


CASES = [(name, layout) for name in NAMES for layout in ("dp4 / ep4", "dp8 / ep4 etp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), full_but(CASES, ("all_to_all", CASES[0][1])))
def test_even_routing_fits_and_overflow_is_counted(name, layout, emulated):
    """48 rows a device with even routing, and 64 of room: the rows of the third expert fit, and
    half of the 128 rows of the first two."""
    mesh = mesh_of(layout)
    run = program(mesh, dispatch=name, buffer_factor=1.0)
    given = weights(), tokens()
    for kind, expected_overflow in (("even", 0), ("all to the same", 64)):
        routing = routing_of(kind)
        out, overflow, gradients = run(*given, routing)
        assert int(overflow) == expected_overflow * mesh.size(mesh.etp)
        if kind == "even":
            expected, expected_gradients = oracle(*given, routing)
            # float32 sums of three experts' outputs, and of two dozen rows in the gradients.
            np.testing.assert_allclose(out, expected, atol=5e-6)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5),
                gradients,
                expected_gradients,
            )
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, gradients)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_found_no_slot_are_counted_too(name, emulated):
    """Room for 32 rows a device, and for less than the tokens of all."""
    run = program(mesh_of("dp4 / ep4"), dispatch=name, buffer_factor=0.25)
    for kind in ("even", "all to the same"):
        out, overflow, gradients = run(weights(), tokens(), routing_of(kind))
        assert int(overflow) > 0
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, gradients)))
