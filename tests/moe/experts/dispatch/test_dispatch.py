"""Every way to the experts and back against the dense oracle, and what each moves."""

import functools
import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from ragged import ragged_by_gathering
from references import dense_reference
from tiers import full_but

from moe.execution import TWO_LEVELS, Execution
from moe.experts.dispatch import ragged as ragged_dispatcher
from moe.experts.dispatch.buffers import DispatchOptions, peer_assignments, peer_tokens, slots_of
from moe.experts.dispatch.choice import IMPLEMENTATIONS, dispatch, rows_received
from moe.experts.feed_forward import routed_experts
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract

# Sixteen tokens over the devices, of eight experts three for each.
TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 16, 8, 3, 6, 10
LAYOUTS = [
    "dp1",
    "dp8 / ep8",
    "tp2 dp4 / ep4",
    "tp2 / etp2",
    "tp2 dp4 / ep2 etp2",
    "dp8 / ep4 etp2",
]


NAMES = ["all_to_all", "all_gather", "ragged", "two_level", "two_level_ragged"]


def by(name, server_devices=2):
    """The execution with a dispatcher."""
    return Execution(dispatch=name, server_devices=server_devices if name in TWO_LEVELS else None)


def expert_weights():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(draw.normal(size=shape) / shape[-2] ** 0.5, np.float32)

    return Experts(
        router=normal(D_MODEL, ROUTE),
        gate_up=np.stack([normal(ROUTE, D_MODEL, D_EXPERT) for _ in range(2)], axis=2),
        down=normal(ROUTE, D_EXPERT, D_MODEL),
    )


def tokens(dtype=np.float32):
    return np.random.default_rng(1).normal(size=(TOKENS, D_MODEL)).astype(dtype)


def routing_of(kind, num_devices=1, capacity=None):
    """Choices of all tokens; with a capacity each device keeps that many of an expert, in order."""
    draw = np.random.default_rng(7)
    if kind == "one device gets all":
        experts = np.tile([1, 0, 2], (TOKENS, 1))
    else:
        experts = np.stack([draw.permutation(ROUTE)[:CHOSEN] for _ in range(TOKENS)])
    weights = draw.random((TOKENS, CHOSEN))
    padding = draw.random(TOKENS) < 0.3
    if kind == "a device of padding":
        padding[:4] = True
    experts[padding] = ROUTE
    for own in np.split(np.arange(TOKENS), num_devices):
        seen = np.zeros(ROUTE + 1, int)
        for token in own:
            for choice in range(CHOSEN):
                expert = experts[token, choice]
                seen[expert] += 1
                if capacity is not None and seen[expert] > capacity:
                    experts[token, choice] = ROUTE
    weights[experts == ROUTE] = 0
    return Routing(experts.astype(np.int32), weights.astype(np.float32))


def on(mesh, function):
    """`function(weights, x, routing)` inside the one `jax.shard_map`, NaN where choices found no
    room."""

    def complete(*given):
        out, overflow = counting(mesh, function)(*given)
        return out + jnp.where(overflow == 0, 0.0, jnp.nan).astype(out.dtype)

    return complete


def counting(mesh, function):
    """The same and, over all devices, the choices that found no room."""
    inner = P(mesh.ep, None, None, mesh.etp)

    def counted(*given):
        out, overflow = function(*given)
        return out, all_sum(overflow, mesh.axes)

    spec = Experts(router=P(), gate_up=inner, down=P(mesh.ep, mesh.etp))
    return jax.shard_map(
        counted,
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.axes), P(mesh.axes)),
        out_specs=(P(mesh.axes), P()),
    )


def pulled(function):
    """Gradients by weights, tokens and the routing's weights, and the output."""

    def inner(weights, x, scale, routing):
        out = function(weights, x, routing._replace(probs=scale))
        pull = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * pull), out

    return jit(jax.grad(inner, argnums=(0, 1, 2), has_aux=True))


@functools.cache
def oracle():
    return pulled(lambda weights, x, routing: dense_reference(weights, x, *routing))


def agrees(program, routing, name):
    weights, x = expert_weights(), tokens()
    gradients, out = jax.device_get(program(weights, x, routing.probs, routing))
    expected_gradients, expected = jax.device_get(oracle()(weights, x, routing.probs, routing))
    # A dropped choice has weight 0 whatever it would have given: no gradient is asked of it.
    sent = routing.experts < ROUTE
    # float32 sums of three experts' outputs, and of sixteen rows in the gradients.
    np.testing.assert_allclose(out, expected, atol=3e-6, err_msg=name)
    for a, b in zip(gradients[:2], expected_gradients[:2], strict=True):
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5, err_msg=name), a, b)
    np.testing.assert_allclose(gradients[2][sent], expected_gradients[2][sent], atol=1e-5)
    np.testing.assert_array_equal(out[~sent.any(axis=1)], 0)


@pytest.mark.slow
def test_a_token_is_at_the_peers_that_it_goes_to_in_their_order():
    goes = np.asarray([[0, 1, 0, 1, 0], [1, 1, 0, 0, 1], [0] * 5, [0, 0, 0, 0, 1]], bool)
    slot = np.where(goes, np.arange(20).reshape(5, 4).T, 20)
    token, places = slots_of(jnp.asarray(slot), num_slots=20, k=3)
    assert [row[row < 20].tolist() for row in places] == [row[row < 20].tolist() for row in slot]
    for place in range(20):
        assert token[place] == (place % 4 if goes[place % 4, place // 4] else 4)
    for row, own in zip(places, slot, strict=True):
        assert all(place in own for place in row), "a place of another token"


@pytest.mark.parametrize("layout", full_but(LAYOUTS, "tp2 dp4 / ep2 etp2"))
@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_dispatch_equals_the_dense_oracle(name, layout):
    equals_the_oracle(mesh_of(layout), by(name))


def equals_the_oracle(mesh, execution):
    program = pulled(on(mesh, partial(dispatch, mesh=mesh, execution=execution)))
    for kind in ("any", "one device gets all", "a device of padding"):
        agrees(program, routing_of(kind), kind)


SERVERS = [
    ("dp1", 2),
    ("dp8 / ep8", 4),
    ("dp8 / ep8", 2),
    ("tp2 dp4 / ep4", 2),
    ("dp8 / ep4 etp2", 4),
    # All of a server share experts, or none do.
    ("dp8 / ep4 etp2", 8),
    ("tp2 dp4 / ep2 etp2", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "server_devices"), SERVERS)
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_two_levels_equal_the_dense_oracle(name, layout, server_devices, emulated):
    equals_the_oracle(mesh_of(layout), by(name, server_devices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity"),
    list(itertools.product(["all_to_all", "all_gather", *TWO_LEVELS], [1, 2])),
)
def test_capacity_buffers_hold_admitted_tokens(name, capacity, emulated):
    mesh = mesh_of("tp2 dp4 / ep4 etp2" if name in TWO_LEVELS else "tp2 dp4 / ep2 etp2")
    options = {"execution": by(name, server_devices=4), "capacity": capacity}
    program = pulled(on(mesh, partial(dispatch, mesh=mesh, **options)))
    for kind in ("any", "one device gets all"):
        routing = routing_of(kind, num_devices=8, capacity=capacity)
        agrees(program, routing, kind)


def in_half_precision(function):
    """`function(weights, x, routing)` of bfloat16 tokens, and the rows that their experts give,
    weighted before the second product, ``[choice, token, d_model]``."""
    weights, x, routing = expert_weights(), tokens(jnp.bfloat16), routing_of("any")

    @jit
    def rows(weights, x, experts, probs):
        one = [
            routed_experts(weights, x, experts[:, k, None], probs[:, k, None])[0]
            for k in range(CHOSEN)
        ]
        return jnp.stack(one)

    given = np.asarray(rows(weights, x, *routing))
    np.testing.assert_array_equal(given, given.astype(jnp.bfloat16).astype(np.float32))
    out = jit(function)(weights, x, routing)
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64), np.asarray(given, np.float64), routing.experts


def half_unit(x):
    """Of eight bits."""
    return 2.0 ** (np.ceil(np.log2(np.abs(x) + 1e-9)) - 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_rounded_where_the_contract_says(name, emulated):
    """Neither what a device adds up is rounded before the sum is, nor what devices add up."""
    mesh = mesh_of("dp4 / ep4")
    function = on(mesh, partial(dispatch, mesh=mesh, execution=by(name)))
    out, rows, experts = in_half_precision(function)
    peers = np.moveaxis(experts, 1, 0)[..., None] // 2
    parts = np.stack([np.sum(rows, axis=0, where=peers == peer) for peer in range(4)])
    exact = np.sum(parts, axis=0)
    # float32 sums of terms of order one, and what each device rounds for the way back.
    allowed = half_unit(exact) + 1e-6
    if name != "all_gather":
        allowed = allowed + np.sum(half_unit(parts), axis=0)
    if name in TWO_LEVELS:
        servers = parts.reshape(2, 2, *parts.shape[1:]).sum(axis=1)
        allowed = allowed + np.sum(half_unit(servers), axis=0)
    np.testing.assert_array_less(np.abs(out - exact), allowed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_expert_chosen_twice_counts_twice(name, emulated):
    """As a replayed routing may have it: more choices than a peer has slots for, and none lost."""
    mesh = mesh_of("dp4 / ep4")
    experts = routing_of("any").experts
    # The last tokens of each device choose one expert of the first device again and again.
    experts[np.arange(TOKENS) % 4 > 0] = [[0, 0, 0]]
    experts[::4] = [3, 2, 3]
    assert peer_assignments(4, CHOSEN, 2, None) == 8 < 9
    scale = np.random.default_rng(3).random(experts.shape)
    routing = Routing(experts.astype(np.int32), scale.astype(np.float32))
    agrees(pulled(on(mesh, partial(dispatch, mesh=mesh, execution=by(name)))), routing, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(NAMES, "ragged"))
def test_more_than_the_capacity_promised_takes_nobodys_place(name, emulated):
    """What has no slot adds nothing, and rows for another device are not written over."""
    mesh = mesh_of("dp4 / ep4")
    experts = np.tile([0, 1, ROUTE], (TOKENS, 1))
    experts[::4] = [4, ROUTE, ROUTE]
    assert peer_assignments(4, CHOSEN, 2, 1) == 2 < 6
    scale = np.where(experts < ROUTE, 0.25, 0.0)
    routing = Routing(experts.astype(np.int32), scale.astype(np.float32))
    options = {"execution": by(name), "capacity": 1}
    program = jit(counting(mesh, partial(dispatch, mesh=mesh, **options)))
    given = expert_weights(), tokens(), routing
    out, overflow = jax.device_get(program(*given))
    assert overflow > 0
    _, expected = jax.device_get(oracle()(*given[:2], routing.probs, routing))
    assert np.all(np.isfinite(out))
    np.testing.assert_allclose(out[::4], expected[::4], atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "dp8 / ep4 etp2"], "dp8 / ep4 etp2"))
def test_ragged_equals_the_dense_oracle_on_emulated_collectives(layout, monkeypatch):
    monkeypatch.setattr(ragged_dispatcher.lax, "ragged_all_to_all", ragged_by_gathering)
    mesh = mesh_of(layout)
    program = pulled(
        on(mesh, lambda *given: IMPLEMENTATIONS["ragged"](*given, DispatchOptions(mesh)))
    )
    for kind in ("any", "one device gets all", "a device of padding"):
        agrees(program, routing_of(kind), kind)


RAGGED = Execution(dispatch="ragged", buffer_factor=1.5)


@pytest.mark.slow
def test_ragged_is_lowered_for_cuda_with_its_gradient():
    mesh = fold_abstract(Layout.parse("dp8 / ep4 etp2"), "gpu")
    function = on(mesh, partial(dispatch, mesh=mesh, execution=RAGGED))
    given = (expert_weights(), tokens(), routing_of("any"))

    def total(weights, x, routing):
        return jnp.sum(function(weights, x, routing))

    exported = jax.export.export(
        jax.jit(jax.value_and_grad(total, argnums=(0, 1))),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")],
    )(*given)
    text = exported.mlir_module()
    # Tokens out, sums back; their gradients the other way. A slice for each expert of a peer.
    calls = re.findall(r"custom_call @ragged_all_to_all.*: \((.*)\) ->", text)
    assert len(calls) == 4
    assert {re.findall(r"tensor<(\d+)xi32>", call)[0] for call in calls} == {str(ROUTE)}


@unchecked()
def test_dispatch_rejects_unsupported_settings():
    mesh = mesh_of("dp2 / ep2")
    for name, message in (
        ("ragged", r'dispatch="ragged" needs jax.lax.ragged_all_to_all, which CPU devices do not'),
        (
            "alltoall",
            r"dispatch='alltoall' is not known: choose among all_to_all, all_gather, ragged, two_l",
        ),
    ):
        function = on(mesh, partial(_named, mesh, name))
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(function, expert_weights(), tokens(), routing_of("any"))


def _named(mesh, name, *given):
    return dispatch(*given, mesh, Execution(dispatch=name))


COLLECTIVE = r"= (.*?) (all-gather|reduce-scatter|all-to-all)\("
ARRAY = r"(f32|s32)\[([\d,]*)\]"  # four bytes an element


def received(text, mesh):
    """Bytes one device receives in the collectives of a compiled program, per kind and type."""
    total = {}
    for result, name in re.findall(COLLECTIVE, text):
        devices = mesh.size(mesh.etp) if name != "all-to-all" else mesh.size(mesh.ep)
        share = devices - 1 if name == "reduce-scatter" else (devices - 1) / devices
        # The result of an all-to-all may be one array or an array per peer.
        for kind, shape in re.findall(ARRAY, result):
            size = 4 * math.prod(int(n) for n in shape.split(","))
            total[name, kind] = total.get((name, kind), 0) + size * share
    return total


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1])
def test_volume_of_all_to_all_is_that_of_its_formula(capacity):
    mesh = mesh_of("dp8 / ep4 etp2")
    text = _compiled("all_to_all", capacity, mesh)
    local, num_local = TOKENS // 8, ROUTE // 4
    per_peer = peer_tokens(local, CHOSEN, num_local, mesh, capacity)
    row, ep, etp = 4 * D_MODEL, 4, 2
    moved = received(text, mesh)
    routing = 4 * CHOSEN
    assert moved == {
        ("all-to-all", "f32"): per_peer * (ep - 1) * (2 * row + routing),
        ("all-to-all", "s32"): per_peer * (ep - 1) * routing,
        ("all-gather", "f32"): per_peer * ep * (etp - 1) * (row + routing),
        ("all-gather", "s32"): per_peer * ep * (etp - 1) * routing,
        ("reduce-scatter", "f32"): per_peer * ep * (etp - 1) * row,
    }
    # As many ids as probs: what is left are tokens and sums.
    numbers = {"f32": 1, "s32": -1}
    rows = sum(size * numbers[kind] for (_, kind), size in moved.items()) / row
    assert rows == rows_received("all_to_all", local, CHOSEN, num_local, mesh, capacity)


@pytest.mark.slow
def test_volume_of_all_gather_is_that_of_its_formula():
    mesh = mesh_of("dp8 / ep4 etp2")
    text = _compiled("all_gather", None, mesh)
    local, others, row = TOKENS // 8, 7, 4 * D_MODEL
    shapes = [
        (*array, name)
        for result, name in re.findall(COLLECTIVE, text)
        for array in re.findall(ARRAY, result)
    ]
    # Out tokens, weights and ids of all; back the sum of one's own.
    assert sorted(shapes) == sorted(
        [
            ("f32", f"{TOKENS},{D_MODEL}", "all-gather"),
            ("f32", f"{TOKENS},{CHOSEN}", "all-gather"),
            ("s32", f"{TOKENS},{CHOSEN}", "all-gather"),
            ("f32", f"{local},{D_MODEL}", "reduce-scatter"),
        ]
    )
    rows = rows_received("all_gather", local, CHOSEN, ROUTE // 4, mesh)
    assert rows * row == (TOKENS - local) * row + others * local * row


def _compiled(name, capacity, mesh):
    function = on(
        mesh, lambda *given: dispatch(*given, mesh, Execution(dispatch=name), capacity=capacity)
    )
    given = expert_weights(), tokens(), routing_of("any", 8, capacity)
    return jit(function).lower(*given).compile().as_text()


@functools.cache
def free_program(layout):
    mesh = mesh_of(layout)
    return jit(on(mesh, lambda *given: dispatch(*given, mesh, Execution())))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.permutations(range(TOKENS)), st.sampled_from(["dp1", "dp8 / ep4 etp2"]))
def test_tokens_in_another_order_give_outputs_in_that_order(order, layout):
    weights, x, routing = expert_weights(), tokens(), routing_of("any")
    order = np.asarray(order)
    program = free_program(layout)
    out = np.asarray(program(weights, x, routing))
    moved = program(weights, x[order], jax.tree.map(lambda a: a[order], routing))
    # The same products in blocks of other rows: a few units in the seventh digit.
    np.testing.assert_allclose(moved, out[order], atol=3e-6)
