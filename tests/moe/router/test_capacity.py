"""Which choices are dropped, against loops over experts, on one device and on several."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh
from tiers import full_but

from moe.architecture.feed_forward import can_drop
from moe.config import Model, ModelConfig
from moe.ops.zigzag import ZigzagLayout
from moe.router.layer import capacity_of, drop
from moe.router.routing import Routing
from sharding.folding import Layout, fold_abstract

ROUTE, CHOSEN, TOKENS = 5, 2, 24
CONFIG = ModelConfig(vocab_size=3, num_experts=ROUTE, experts_per_token=CHOSEN)


def routing_of(seed, tokens=TOKENS):
    """Uneven choices, some weights equal, some tokens padding."""
    draw = np.random.default_rng(seed)
    liking = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    experts = np.stack([draw.choice(ROUTE, CHOSEN, False, liking) for _ in range(tokens)])
    weights = (draw.integers(1, 9, (tokens, CHOSEN)) / 8).astype(np.float32)
    padding = draw.random(tokens) < 0.2
    experts[padding], weights[padding] = ROUTE, 0
    return Routing(experts.astype(np.int32), weights)


def kept_by_loops(experts, weights, capacity, policy):
    """``[token, k]`` what an expert keeps, one expert after the other."""
    kept = np.zeros(experts.shape, bool)
    for expert in range(ROUTE):
        choices = [(t, c) for t, c in np.ndindex(*experts.shape) if experts[t, c] == expert]
        if policy == "probs":
            choices.sort(key=lambda place: -weights[place])  # stable: equal ones by position
        for place in choices[:capacity]:
            kept[place] = True
    return kept


def zigzag_of(mesh):
    """All tokens of a sequence-parallel group in one row."""
    return ZigzagLayout(((1, TOKENS // mesh.size(mesh.dp)),), mesh.size(mesh.cp))


def dropping(config, layout, zigzag=None):
    mesh = mesh_of(layout)
    zigzag, spec = zigzag or zigzag_of(mesh), P(mesh.axes)
    return on_mesh(
        lambda routing: drop(routing, zigzag, Model(config, mesh)), mesh, (spec,), (spec, spec)
    )


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(
    ("layout", "scope", "groups"),
    full_but(
        [
            ("dp1", "sub_sequence", 1),
            ("tp2 dp4", "sub_sequence", 8),
            ("tp2 dp4 / ep4 etp2", "full_sequence", 4),
        ],
        ("dp1", "sub_sequence", 1),
        ("tp2 dp4 / ep4 etp2", "full_sequence", 4),
    ),
)
def test_drop_equals_plain_loops(policy, layout, scope, groups):
    config = replace(CONFIG, capacity_factor=1.25, drop_policy=policy, drop_scope=scope)
    program = dropping(config, layout)
    # Tokens of a scope, times 2 of 5, times 1.25.
    capacity = {24: 12, 3: 2, 6: 3}[TOKENS // groups]
    mesh = mesh_of(layout)
    assert capacity_of(zigzag_of(mesh), Model(config, mesh)) == capacity
    total = 0
    for seed in range(4):
        routing = routing_of(seed)
        out, dropped = jax.device_get(program(routing))
        experts, weights = routing
        kept = np.concatenate(
            [
                kept_by_loops(experts[own], weights[own], capacity, policy)
                for own in np.split(np.arange(TOKENS), groups)
            ]
        )
        np.testing.assert_array_equal(out.experts, np.where(kept, experts, ROUTE))
        np.testing.assert_array_equal(out.probs, np.where(kept, weights, 0))
        np.testing.assert_array_equal(dropped, ((experts < ROUTE) & ~kept).sum(axis=1))
        total += int(dropped.sum())
    assert total > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("layout", ["tp2 cp2", pytest.param("cp2", marks=pytest.mark.slow)])
def test_full_sequence_drop_is_independent_of_layout(layout, policy):
    """Two sections whose rows ``cp`` cuts and pads: the same drops as on one device."""
    config = replace(CONFIG, capacity_factor=0.8, drop_policy=policy, drop_scope="full_sequence")
    sections = ((2, 3), (4, 5))
    one, zigzag = (ZigzagLayout(sections, mesh_of(x).size(mesh_of(x).cp)) for x in ("dp1", layout))
    routing = routing_of(4, one.num_tokens)

    @jit
    def spread(routing):
        # Places that only the packed batch has are nobody's: their id is past the last.
        return Routing(
            zigzag.flatten(*one.restore(routing.experts - ROUTE)) + ROUTE,
            zigzag.flatten(*one.restore(routing.probs)),
        )

    packed = jax.device_get(spread(routing))
    assert packed.experts.shape[0] > routing.experts.shape[0]
    out = jax.device_get(dropping(config, layout, zigzag)(packed))
    gather = jit(lambda out: [one.flatten(*zigzag.restore(x)) for x in jax.tree.leaves(out)])
    whole, (experts, weights) = jax.device_get(gather(out)), routing
    kept = kept_by_loops(experts, weights, 9, policy)  # 0.8 x 26 x 2 / 5, rounded up
    np.testing.assert_array_equal(whole[0], np.where(kept, experts, ROUTE))
    np.testing.assert_array_equal(whole[1], np.where(kept, weights, 0))
    np.testing.assert_array_equal(whole[2], ((experts < ROUTE) & ~kept).sum(axis=1))
    assert whole[2].sum() > 0


def test_no_capacity_drops_nothing():
    routing = routing_of(0)
    out, dropped = jax.device_get(dropping(CONFIG, "dp1")(routing))
    np.testing.assert_array_equal(out.experts, routing.experts)
    np.testing.assert_array_equal(out.probs, routing.probs)
    assert float(dropped.sum()) == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.1, 1.0, 2.0, 9.0]),
    st.sampled_from(["probs", "position"]),
)
def test_no_choice_is_lost(seed, factor, policy):
    """What is kept and what is dropped are the choices of the tokens that are not padding."""
    config = replace(CONFIG, capacity_factor=factor, drop_policy=policy)
    mesh = mesh_of("dp1")
    routing = routing_of(seed)
    program = _DROPS.setdefault((factor, policy), dropping(config, "dp1"))
    out, dropped = jax.device_get(program(routing))
    valid = routing.experts[:, 0] < ROUTE
    kept = out.experts < ROUTE
    assert kept.sum() + int(dropped.sum()) == valid.sum() * CHOSEN
    load = [int((out.experts == expert).sum()) for expert in range(ROUTE)]
    assert max(load) <= capacity_of(zigzag_of(mesh), Model(config, mesh))


_DROPS = {}


@pytest.mark.parametrize(
    ("factor", "scope", "expected"),
    [
        (1.0, "sub_sequence", 5),  # 12 x 2 / 5: a device has 12 places
        (1.01, "sub_sequence", 5),
        (1.1, "sub_sequence", 6),  # 5.28
        (0.01, "sub_sequence", 1),
        (99.0, "sub_sequence", 12),  # no more than there are tokens
        (1.0, "full_sequence", 16),  # 40 x 2 / 5: the rows have 40
        (99.0, "full_sequence", 40),
    ],
)
def test_capacities(factor, scope, expected):
    mesh = fold_abstract(Layout.parse("tp2 cp2 dp2"))
    config = replace(CONFIG, capacity_factor=factor, drop_scope=scope)
    # Rows of 10 that cp pads to 12.
    zigzag = ZigzagLayout(((4, 10),), ranks=2)
    assert capacity_of(zigzag, Model(config, mesh)) == expected
    assert capacity_of(zigzag, Model(CONFIG, mesh)) is None


@pytest.mark.parametrize(
    ("factor", "per_token", "drops"),
    [(None, 2, False), (0.1, 2, True), (1.99, 2, True), (2.0, 2, False), (1.3, 3, True)],
)
def test_a_capacity_from_which_on_nothing_can_drop(factor, per_token, drops):
    config = ModelConfig(5, num_experts=4, experts_per_token=per_token, capacity_factor=factor)
    assert can_drop(config) == drops
    capacity = capacity_of(ZigzagLayout(((1, 4096),), ranks=1), Model(config, mesh_of("dp1")))
    assert (capacity is not None and capacity < 4096) == drops
