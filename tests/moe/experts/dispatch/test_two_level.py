"""Dispatch in two levels: what crosses between servers, and when there is one level."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from observed_collectives import hlo_collectives, jaxpr_collectives
from programs import jit, mesh_of
from references import dense_reference

from moe.execution import Execution
from moe.experts.dispatch.buffers import peer_tokens
from moe.experts.dispatch.choice import check_dispatch, dispatch, rows_received
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract

TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 256, 16, 5, 6, 10


def drawn(seed=0):
    draw = np.random.default_rng(seed)
    shapes = (D_MODEL, ROUTE), (ROUTE, D_MODEL, 2, D_EXPERT), (ROUTE, D_EXPERT, D_MODEL)
    weights = Experts(*(np.asarray(draw.normal(size=shape) / 2, np.float32) for shape in shapes))
    x = draw.normal(size=(TOKENS, D_MODEL)).astype(np.float32)
    experts = np.stack([draw.permutation(ROUTE)[:CHOSEN] for _ in range(TOKENS)])
    routing = Routing(experts.astype(np.int32), draw.random(experts.shape, np.float32))
    return weights, x, routing


def on(mesh, capacity=None, **execution):
    """(experts, tokens, routing) -> sums, and what found no room on all devices."""
    spec = Experts(P(), P(mesh.ep, None, None, mesh.etp), P(mesh.ep, mesh.etp))

    def local(*given):
        out, overflow = dispatch(*given, mesh, Execution(**execution), capacity=capacity)
        return out, all_sum(overflow, mesh.axes)

    rows = P(mesh.axes)
    return jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, rows, rows), out_specs=(rows, P()))


def crossing_bytes(mesh, of_server, **options):
    """Bytes that the busiest device of a compiled program sends to others, in all-to-alls: to
    devices of its server, and to devices of other servers."""
    text = jit(on(mesh, **options)).lower(*drawn()).compile().as_text()
    sent = np.zeros((2, mesh.size(mesh.axes)))
    for one in hlo_collectives(text):
        if one.kind != "all_to_all":
            continue
        for group in one.over:
            for rank in group:
                for other in group:
                    crosses = int(rank // of_server != other // of_server)
                    sent[crosses, rank] += (rank != other) * one.bytes / len(group)
    return sent.max(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp16 / ep16", {}),
        ("tp2 dp8 / ep8 etp2", {"capacity": 2}),
        ("dp16 / ep8", {"buffer_factor": 0.8}),
    ],
)
def test_one_copy_crosses_to_a_server(layout, options):
    mesh = mesh_of(layout)
    tokens, ep, etp = TOKENS // 16, mesh.size(mesh.ep), mesh.size(mesh.etp)
    devices = 4 // etp
    sizes = tokens, CHOSEN, ROUTE // ep, mesh, options.get("capacity"), options.get("buffer_factor")
    per_device, servers = peer_tokens(*sizes), ep // devices
    per_server = min(tokens, devices * per_device)
    # A token, its ids and gate weights out and a sum back, four bytes each.
    row = 4 * (2 * D_MODEL + 2 * CHOSEN)
    two = crossing_bytes(mesh, 4, dispatch="two_level", server_devices=4, **options)
    assert two == [
        row * servers * per_device * (devices - 1),
        row * per_server * (servers - 1),
    ]
    one = crossing_bytes(mesh, 4, dispatch="all_to_all", **options)
    assert one == [
        row * per_device * (devices - 1),
        row * per_device * devices * (servers - 1),
    ]
    assert (two[1] < one[1]) is (devices * per_device > tokens)
    rows = rows_received("two_level", *sizes, server_devices=4)
    over_etp = 2 * per_device * ep * (etp - 1)
    assert rows - over_etp == sum(two) / row * 2


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "server_devices"), [("dp8 / ep4", 4), ("dp8 / ep8", 1)])
def test_one_server_or_one_device_of_each_is_one_level(layout, server_devices):
    mesh = fold_abstract(Layout.parse(layout))
    kinds = [
        [(one.kind, one.over, one.shape) for one in jaxpr_collectives(program.jaxpr)]
        for program in (
            jax.make_jaxpr(on(mesh, dispatch="all_to_all"))(*drawn()),
            jax.make_jaxpr(on(mesh, dispatch="two_level", server_devices=server_devices))(*drawn()),
        )
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_even_routing_fits():
    """Six slots for the five tokens of a device that go to another, and more for the eight that go
    to a server."""
    mesh = mesh_of("dp16 / ep16")
    weights, x, routing = drawn()
    experts = (CHOSEN * np.arange(TOKENS)[:, None] + np.arange(CHOSEN)) % ROUTE
    routing = Routing(experts.astype(np.int32), routing.probs)
    assert peer_tokens(16, CHOSEN, 1, mesh, None, 1.0) == 6
    options = {"dispatch": "two_level", "server_devices": 4, "buffer_factor": 1.0}
    out, overflow = jit(on(mesh, **options))(weights, x, routing)
    assert int(overflow) == 0
    # float32 sums of five experts' outputs.
    np.testing.assert_allclose(out, jit(dense_reference)(weights, x, *routing), atol=1e-5)


@pytest.mark.slow
def test_space_that_one_server_leaves_free_is_anothers():
    """All 64 tokens of one device go to one of another server, which has 32 slots for the tokens of
    each of two devices."""
    mesh = mesh_of("dp4 / ep4")
    weights, x, routing = drawn()
    experts = np.full((TOKENS, CHOSEN), ROUTE, np.int32)
    experts[:64, 1] = 8
    routing = Routing(experts, routing.probs)
    assert peer_tokens(64, CHOSEN, 4, mesh, None, 0.4) == 32
    options = {"mesh": mesh, "buffer_factor": 0.4}
    for name, server_devices, expected in (("two_level", 2, 0), ("all_to_all", None, 32)):
        chosen = {"dispatch": name, "server_devices": server_devices}
        _, overflow = jit(on(**options, **chosen))(weights, x, routing)
        assert int(overflow) == expected


@pytest.mark.parametrize(
    ("layout", "server_devices", "message"),
    [
        ("dp6 / ep6", 4, r"servers of 4 devices cut groups of 6 of .* unequal parts, such as 4, 2"),
        ("dp8 / ep4", 3, r"two_level': servers of 3 devices cut groups of 4"),
        ("dp8 / ep8", None, r"number of devices of a server is not known.*give server_devices"),
    ],
)
def test_servers_that_do_not_divide_are_refused(layout, server_devices, message):
    mesh = fold_abstract(Layout.parse(layout), "gpu")
    with pytest.raises(ValueError, match=message) as error:
        check_dispatch("two_level", mesh, server_devices)
    assert "\n" not in str(error.value)
