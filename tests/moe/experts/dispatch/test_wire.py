"""Tokens that travel in FP8 against a plain twin on one device, values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from references import dense_reference
from tiers import full_but

from moe.execution import Execution
from moe.experts.dispatch.choice import dispatch
from moe.router.routing import Routing
from moe.weights import Experts
from sharding import compression

TOKENS, ROUTE, CHOSEN, D_MODEL, D_EXPERT = 20, 8, 3, 6, 10
FP8 = "float8_e4m3fn"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Of the five tokens of a device two whole groups and a part."""
    monkeypatch.setattr(compression, "GROUP_TOKENS", 2)


def drawn():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(draw.normal(size=shape) / shape[-2] ** 0.5, np.float32)

    gate_up = np.stack([normal(ROUTE, D_MODEL, D_EXPERT) for _ in range(2)], axis=2)
    weights = Experts(normal(D_MODEL, ROUTE), gate_up, normal(ROUTE, D_EXPERT, D_MODEL))
    experts = np.stack([draw.permutation(ROUTE)[:CHOSEN] for _ in range(TOKENS)])
    experts[3] = ROUTE  # padding
    probs = np.where(experts < ROUTE, draw.random((TOKENS, CHOSEN)), 0)
    x = draw.normal(size=(TOKENS, D_MODEL)).astype(np.float32)
    routing = Routing(experts.astype(np.int32), probs.astype(np.float32))
    return weights, x, routing


@jax.custom_vjp
def there(x):
    """What arrives of rows that one device sends another, and of their gradient on its way back."""
    return compression.decode_tokens(compression.encode_tokens(x))


def back(_, gradient):
    return (compression.decode_channels(compression.encode_channels(gradient)),)


there.defvjp(lambda x: (there(x), None), back)


def twin(weights, x, routing, peers, everywhere=False):
    """The experts' sums, a pair of devices after the other.

    Args:
      peers: how many devices there are.
      everywhere: all tokens go to every device, those without experts there too.
    """
    out, each, held = jnp.zeros(x.shape, x.dtype), TOKENS // peers, ROUTE // peers
    for source in range(peers):
        own = np.arange(source * each, (source + 1) * each)
        for peer in range(peers):
            chosen = np.asarray(routing.experts)[own] // held == peer
            rows = own if everywhere else own[np.any(chosen, axis=1)]
            if not len(rows):
                continue
            local = routing.experts[rows] - peer * held
            local = jnp.where((local >= 0) & (local < held), local, held)
            part = slice(peer * held, (peer + 1) * held)
            experts = Experts(weights.router, weights.gate_up[part], weights.down[part])
            done = dense_reference(experts, there(x[rows]), local, routing.probs[rows])
            out = out.at[rows].add(there(done))
    return out


def pulled(function):
    def total(weights, x, probs, routing):
        out = function(weights, x, routing._replace(probs=probs))
        pull = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * pull), out

    return jax.grad(total, argnums=(0, 1, 2), has_aux=True)


def on(layout, name, capacity=None, **options):
    mesh = mesh_of(layout)
    execution = Execution(dispatch=name, activation_wire=FP8, **options)
    inner, rows = P(mesh.ep, None, None, mesh.etp), P(mesh.axes)
    spec = Experts(router=P(), gate_up=inner, down=P(mesh.ep, mesh.etp))

    def local(*given):
        return dispatch(*given, mesh, execution, capacity=capacity)[0]

    return jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, rows, rows), out_specs=rows)


TWINS = [("all_to_all", 2), ("all_to_all", 4), ("all_gather", 2), ("ragged", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "peers"), full_but(TWINS, TWINS[0]))
def test_equals_the_twin(name, peers, emulated, monkeypatch):
    if peers == 2:  # each with ten tokens
        monkeypatch.setattr(compression, "GROUP_TOKENS", 4)
    weights, x, routing = drawn()
    given = weights, x, routing.probs, routing
    gradients, out = jax.device_get(jit(pulled(on(f"dp{peers} / ep{peers}", name)))(*given))
    by_hand = partial(twin, peers=peers, everywhere=name == "all_gather")
    # Who sends what to whom is no part of the program.
    program = jit(lambda *given: pulled(by_hand)(*given, routing))
    expected_gradients, expected = jax.device_get(program(*given[:3]))
    # float32 sums in another order: one may decide how FP8 rounds and move a number by a unit, so
    # that a part of them may be a sixteenth of a term apart, and no more.
    close = partial(np.isclose, rtol=1e-5, atol=1e-5)
    pairs = [
        (out, expected),
        *zip(*map(jax.tree.leaves, (gradients, expected_gradients)), strict=True),
    ]
    for found, stated in pairs:
        assert np.mean(close(found, stated)) > 0.97
        np.testing.assert_allclose(found, stated, atol=0.05 * np.max(np.abs(stated)))
    # And not what would be without.
    plain = jit(dense_reference)(weights, x, *routing)
    assert np.mean(close(out, plain)) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("all_to_all", "dp4 / ep2 etp2", {"capacity": 5}),
        ("all_gather", "dp4 / ep2 etp2", {"capacity": 5}),
        ("ragged", "dp4 / ep2 etp2", {"buffer_factor": 4.0}),
        ("all_to_all", "dp4 / ep4", {"expert_chunks": 2}),
        ("two_level", "dp4 / ep4", {"server_devices": 2}),
        ("two_level_ragged", "dp4 / ep4", {"server_devices": 2, "expert_chunks": 2}),
        ("ragged", "dp4 / ep4", {"expert_chunks": 2}),
    ],
)
def test_is_as_far_from_the_experts_as_rounding_explains(name, layout, options, emulated):
    """Values and gradients, in the norm: two to four roundings of up to a sixteenth, 2.6 % each
    where errors spread evenly."""
    weights, x, routing = drawn()
    given = weights, x, routing.probs, routing
    reference = pulled(lambda weights, x, routing: dense_reference(weights, x, *routing))
    programs = pulled(on(layout, name, **options)), reference
    (gradients, out), plain = jax.device_get([jit(program)(*given) for program in programs])
    sent = routing.experts < ROUTE
    # A choice of nobody has no gradient that anybody asks for.
    found = [out, gradients[0].gate_up, gradients[0].down, gradients[1], gradients[2][sent]]
    expected = [plain[1], plain[0][0].gate_up, plain[0][0].down, plain[0][1], plain[0][2][sent]]
    for one, other in zip(found, expected, strict=True):
        apart = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert 0.005 < apart < 0.1
