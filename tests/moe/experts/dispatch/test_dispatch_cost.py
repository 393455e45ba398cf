"""The dispatcher that None takes: by what is sent, over which links, for every pass alike."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from observed_collectives import jaxpr_collectives

from moe.execution import TWO_LEVELS, Execution
from moe.experts.dispatch.choice import IMPLEMENTATIONS, dispatch
from moe.experts.dispatch.cost import (
    MANY_TOKENS,
    NAMES,
    TokenExchange,
    cheapest,
    explain_choice,
    fraction_with_expert,
    hardware_of,
    peer_capacity_of,
    predict_seconds,
)
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.costs.hardware import HARDWARE, UNKNOWN
from sharding.folding import Layout, fold_abstract

H100, H800 = HARDWARE["h100"], HARDWARE["h800"]


def on(layout, platform=None):
    return fold_abstract(Layout.parse(layout), platform)


def quickest(exchange, layout, hardware, names=NAMES):
    takes = predict_seconds(exchange, Layout.parse(layout), hardware)
    return min(names, key=takes.__getitem__)


@pytest.mark.parametrize(
    ("layout", "k", "itemsize", "peer_capacity", "expected"),
    [
        # A peer may need every token: both send the same in float32, and half precision makes
        # all_gather send float32 sums.
        ("dp8 / ep8", 1, 4, 1.0, "all_gather"),
        ("dp8 / ep4 etp2", 2, 4, 1.0, "all_gather"),
        ("dp8 / ep8", 2, 2, 1.0, "all_to_all"),
        # Smaller buffers send less.
        ("dp8 / ep8", 4, 4, 0.5, "all_to_all"),
        ("dp8 / ep4 etp2", 2, 4, 0.5, "all_to_all"),
    ],
)
def test_by_bytes_where_links_are_alike(layout, k, itemsize, peer_capacity, expected):
    assert cheapest(TokenExchange(32, k, 64, itemsize, peer_capacity), on(layout)) == expected
    assert set(NAMES) == set(IMPLEMENTATIONS) - set(TWO_LEVELS)


def test_a_slow_exchange_gathers():
    exchange = TokenExchange(32, 4, 64, 4, peer_capacity=0.5)
    assert cheapest(replace(exchange, rate=0.51), on("dp8 / ep8")) == "all_to_all"
    assert cheapest(replace(exchange, rate=0.49), on("dp8 / ep8")) == "all_gather"


@pytest.mark.parametrize(("k", "expected"), [(5, "all_to_all"), (7, "all_gather")])
def test_the_published_crossover(k, expected):
    """Eight H800s gather from top-6 on, where bytes alone say 8 (Jin et al., section 3.2). They
    send each choice, with buffers for even routing, and sums in the width of tokens."""
    exchange = TokenExchange(64, k, 4096, 4, peer_capacity=k / 8)
    assert quickest(exchange, "dp8 / ep8", H800, NAMES[:2]) == expected
    assert quickest(exchange, "dp8 / ep8", replace(H800, exchange=1.0), NAMES[:2]) == "all_to_all"


def test_links_outside_a_domain_count_for_themselves():
    """Within a server slices as long as they are send least. Over two, a ring leaves each through
    eight adapters, and an exchange sends through a device's own."""
    exchange = TokenExchange(128, 8, 2048, 2)
    assert quickest(exchange, "dp8 / ep8", H100) == "ragged"
    assert quickest(exchange, "dp16 / ep16", H100) == "all_gather"
    assert quickest(exchange, "dp16 / ep16", replace(H100, domain=16)) == "ragged"


def test_ragged_counts_tokens_that_are_there():
    """Tokens of even routing, by drawing it; not the buffers that would hold any."""
    draw, exchange = np.random.default_rng(0), TokenExchange(24, 5, 64, 4)
    layout = Layout.parse("dp6 / ep6")
    chosen = np.argsort(draw.random((20000, 24)), axis=1)[:, :5] // 4
    found = np.mean(np.any(chosen[:, :, None] == np.arange(6), axis=1))
    # The standard error of 120000 draws.
    assert fraction_with_expert(exchange, layout) == pytest.approx(found, abs=5 * 0.5 / 120000**0.5)
    takes = predict_seconds(exchange, layout, UNKNOWN)
    tokens_only = (
        takes["ragged"] - 8 * 5 * 5 * MANY_TOKENS - 4 * 5 * 5 * MANY_TOKENS * 5 / 6 * 6 / 5
    ) / MANY_TOKENS
    assert tokens_only < takes["all_to_all"] / MANY_TOKENS * (
        fraction_with_expert(exchange, layout) + 0.01
    )


def test_peer_capacity_is_that_of_the_buffers():
    assert peer_capacity_of(4, 8, None, None) == 1
    assert peer_capacity_of(4, 8, 1.0, None) == 0.5
    assert peer_capacity_of(4, 8, 1.0, 0.5) == 0.25
    assert peer_capacity_of(4, 8, 9.0, None) == 1


def test_devices_are_known_by_their_kind():
    class Device:
        platform, device_kind = "gpu", "NVIDIA H800"

    class Mesh(jax.sharding.Mesh):
        devices = np.array([Device()], object)

    mesh = replace(on("dp8 / ep8", "gpu"), mesh=object.__new__(Mesh))
    assert hardware_of(mesh) is H800
    assert hardware_of(on("dp8 / ep8", "cpu")) is HARDWARE["laptop"]
    assert hardware_of(on("dp8 / ep8", "gpu")) is UNKNOWN


def test_it_says_why():
    said = explain_choice(TokenExchange(32, 4, 64, 4, peer_capacity=0.5, rate=0.8), on("dp8 / ep8"))
    slower = "an all-to-all at 0.8 of a ring's rate"
    assert (
        said
        == f"all_to_all (predicted from bytes sent: all_gather takes 1.60 times as long; {slower})"
    )
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    ("dtype", "factor", "kind"),
    [("bfloat16", None, "all_to_all"), ("float32", None, "reduce_scatter")],
)
def test_few_tokens_travel_as_many_do(tokens, dtype, factor, kind):
    """A step of decoding takes the way of an update."""
    mesh = on("dp4 / ep4")
    weights = Experts(
        router=jax.ShapeDtypeStruct((6, 8), jnp.float32),
        gate_up=jax.ShapeDtypeStruct((8, 6, 2, 10), jnp.float32),
        down=jax.ShapeDtypeStruct((8, 10, 6), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((4 * tokens, 6), dtype)
    routing = Routing(
        jax.ShapeDtypeStruct((4 * tokens, 3), jnp.int32),
        jax.ShapeDtypeStruct((4 * tokens, 3), jnp.float32),
    )
    rows = P(mesh.axes)
    spec = Experts(router=P(), gate_up=P(mesh.ep, None, None, mesh.etp), down=P(mesh.ep, mesh.etp))
    program = jax.shard_map(
        lambda *given: dispatch(*given, mesh, Execution(buffer_factor=factor))[0],
        mesh=mesh.mesh,
        in_specs=(spec, rows, rows),
        out_specs=rows,
    )
    kinds = {
        one.kind for one in jaxpr_collectives(jax.make_jaxpr(program)(weights, x, routing).jaxpr)
    }
    assert kind in kinds
    assert len(kinds & {"all_to_all", "reduce_scatter"}) == 1
