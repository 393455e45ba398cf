"""The table of weights: stated once, and shapes, values, counts and places all follow from it."""

import math
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit
from tiers import full_but

from moe import weights as moe_weights
from moe.config import Model, ModelConfig, MultiHeadLatentAttention
from moe.placement import shardings
from moe.weights import (
    Weight,
    _initial,
    axis_sizes,
    cast,
    cast_shapes,
    initialise,
    num_active_parameters,
    num_parameters,
    shapes,
    table,
)
from sharding.folding import Layout, fold

# A distinct size for each axis; products are distinct enough to tell two weights apart.
ROUTED = ModelConfig(
    vocab_size=17,
    num_layers=3,
    d_model=20,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=5,
    d_expert=14,
)
initial = jit(initialise, static_argnums=0)

CONFIGS = {
    "routed": ROUTED,
    "shared": replace(ROUTED, d_ff=12, head="tied"),
    "dense": replace(ROUTED, num_experts=0, d_ff=28),
    "critic": replace(ROUTED, head="value"),
}
ATTENTION_SHAPES = {
    "norm": (3, 20),
    "query": (3, 20, 8, 6),
    "key": (3, 20, 4, 6),
    "value": (3, 20, 4, 6),
    "out": (3, 8, 6, 20),
}
EXPERT_SHAPES = {
    "router": (3, 20, 16),
    "gate_up": (3, 16, 20, 2, 14),
    "down": (3, 16, 14, 20),
}


def dense_shapes(d_ff):
    return {"gate_up": (3, 20, 2, d_ff), "down": (3, d_ff, 20)}


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(CONFIGS, "shared", "critic"))
def test_every_weight_is_stated_once(name):
    config = CONFIGS[name]
    stated, weights = table(config), initial(config, jax.random.key(0))
    chex.assert_trees_all_equal_structs(stated, weights)
    sizes = axis_sizes(config)
    for weight, array in zip(jax.tree.leaves(stated), jax.tree.leaves(weights), strict=True):
        assert isinstance(weight, Weight)
        assert array.shape == tuple(sizes[axis] for axis in weight.axes.split())
        assert array.dtype == jnp.float32
        assert set(weight.fan_in.split()) <= set(weight.axes.split())
    assert num_parameters(config) == sum(array.size for array in jax.tree.leaves(weights))
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes(config), weights)


def test_shapes():
    def shapes_of(record):
        return {name: leaf.shape for name, leaf in vars(record).items() if leaf is not None}

    routed, shared, dense, critic = (shapes(config) for config in CONFIGS.values())
    for weights in (routed, shared, dense, critic):
        assert weights.embedding.shape == (17, 20)
        assert weights.norm.shape == (20,)
        assert weights.layers.norm.shape == (3, 20)
        assert shapes_of(weights.layers.attention) == ATTENTION_SHAPES
    for weights in (routed, shared, critic):
        assert shapes_of(weights.layers.experts) == EXPERT_SHAPES
    assert shapes_of(shared.layers.dense) == dense_shapes(12)
    assert shapes_of(dense.layers.dense) == dense_shapes(28)
    assert routed.layers.dense is critic.layers.dense is dense.layers.experts is None
    assert routed.head is not None
    assert routed.head.shape == (20, 17)
    assert shared.head is None
    assert critic.head is not None
    assert critic.head.shape == (20,)


# The sums of these few hundred thousand values have a standard error near 0.2 % of the deviation.
LARGE = ModelConfig(
    vocab_size=512,
    num_layers=2,
    d_model=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    num_experts=4,
    d_expert=96,
    d_ff=128,
)


@pytest.mark.slow
def test_initial_values_have_the_stated_variance():
    sizes = axis_sizes(LARGE)
    weights = jax.tree.leaves(initial(LARGE, jax.random.key(3)))
    for weight, array in zip(jax.tree.leaves(table(LARGE)), weights, strict=True):
        array = np.asarray(array, np.float64)
        if not weight.fan_in:
            np.testing.assert_array_equal(array, weight.scale)
            continue
        deviation = weight.scale / math.sqrt(math.prod(sizes[a] for a in weight.fan_in.split()))
        # 2000 values of the router have a standard error of 1.2 % of the deviation.
        np.testing.assert_allclose(array.std(), deviation, rtol=0.03, err_msg=weight.axes)
        assert abs(array.mean()) < 0.08 * deviation, weight.axes
        # Cut at two deviations of the normal before cutting, which is 2 / 0.8796 of what remains.
        assert 1.9 < np.abs(array).max() / deviation < 2.28, weight.axes


def test_scales_of_the_table():
    weights = table(ROUTED)
    residual = 1 / math.sqrt(2 * ROUTED.num_layers)
    assert weights.layers.experts is not None
    scaled = [weights.layers.attention.out, weights.layers.experts.down]
    assert [weight.scale for weight in scaled] == [residual, residual]
    assert [weight.fan_in for weight in scaled] == ["head head_dim", "d_expert"]
    assert table(CONFIGS["critic"]).head == Weight("d_model", scale=0.0, float32=True)


@pytest.mark.slow
def test_initial_values_depend_on_the_key_only():
    first, again, other = (initial(ROUTED, jax.random.key(seed)) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(first.embedding, other.embedding)
    # Two weights of one shape start apart, and so do the halves of one.
    assert not np.array_equal(first.layers.attention.key, first.layers.attention.value)
    gate, up = np.moveaxis(np.asarray(first.layers.experts.gate_up), 3, 0)
    assert not np.array_equal(gate, up)
    placed = jit(
        lambda key: jax.tree.leaves(initialise(ROUTED, key)),
        out_shardings=jax.tree.leaves(
            shardings(Model(ROUTED, fold(Layout(tp=4, dp=2), jax.devices()[:8])))
        ),
    )(jax.random.key(0))
    # The inverse error function may be vectorised otherwise, and what it is given be scaled by
    # one rounding or two: a few units in the last place, near zero in the last place of 1.
    chex.assert_trees_all_close(placed, jax.tree.leaves(first), rtol=2e-6, atol=5e-8)


@pytest.mark.parametrize("flat", [0, 2**22])
def test_the_axes_that_a_weight_is_drawn_along_have_no_say(monkeypatch, flat):
    monkeypatch.setattr(moe_weights, "MAX_FLAT_SAMPLES", flat)
    shape = 3, 4, 5
    sizes = dict(zip("abc", shape, strict=True))
    drawn = jit(lambda key: _initial(Weight("a b c", "b"), sizes, [key]))(jax.random.key(1))
    expected = jax.random.truncated_normal(jax.random.key(1), -2, 2, shape)
    expected = expected / (2 * moe_weights.TRUNCATED_DEVIATION)
    np.testing.assert_allclose(drawn, expected, rtol=2e-6, atol=5e-8)


# Weights of few shapes, each of which is drawn by one program.
ALIKE = ModelConfig(
    vocab_size=4,
    num_layers=3,
    d_model=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    num_experts=4,
    experts_per_token=2,
    d_expert=4,
)


def test_gate_and_up_are_drawn_as_weights_that_stand_apart():
    """With a key each, in the order of the table; the keys of all others follow from it."""
    stated, sizes = table(ALIKE), axis_sizes(ALIKE)
    apart = Weight("layer expert d_model d_expert", "d_model")
    weights = jax.tree.leaves(stated)
    number = weights.index(stated.layers.experts.gate_up)
    listed = [*weights[:number], apart, apart, *weights[number + 1 :]]
    keys = jax.random.split(jax.random.key(0), len(listed))
    drawn = {n: _initial(listed[n], sizes, [keys[n]]) for n in range(number, number + 3)}
    experts = initialise(ALIKE, jax.random.key(0)).layers.experts
    assert experts is not None
    gate_up = np.asarray(experts.gate_up)
    np.testing.assert_array_equal(gate_up[:, :, :, 0], drawn[number])
    np.testing.assert_array_equal(gate_up[:, :, :, 1], drawn[number + 1])
    np.testing.assert_array_equal(experts.down, drawn[number + 2])
    assert not np.array_equal(drawn[number], drawn[number + 1])


def test_numbers_of_parameters():
    attention = 3 * (20 + 2 * 20 * 8 * 6 + 2 * 20 * 4 * 6 + 20)  # the two norms of a block included
    expert, router = 3 * 20 * 14, 20 * 16
    ends = 17 * 20 + 20
    routed = attention + 3 * (16 * expert + router) + ends + 20 * 17
    assert num_parameters(ROUTED) == routed
    assert num_active_parameters(ROUTED) == routed - 3 * 11 * expert
    shared = attention + 3 * (16 * expert + router + 3 * 20 * 12) + ends
    assert num_parameters(CONFIGS["shared"]) == shared
    assert num_active_parameters(CONFIGS["shared"]) == shared - 3 * 11 * expert
    dense = attention + 3 * 3 * 20 * 28 + ends + 20 * 17
    assert num_parameters(CONFIGS["dense"]) == num_active_parameters(CONFIGS["dense"]) == dense


LATENT = replace(
    ROUTED,
    num_kv_heads=8,
    mla=MultiHeadLatentAttention(kv_lora_rank=9, q_lora_rank=11, qk_rope_head_dim=2, v_head_dim=5),
    num_dense_layers=1,
    dense_d_ff=26,
)
WITH_ALL = {"qkv_bias": True, "query_key_norm": "head", "selection_bias": True, "d_ff": 12}
IN_FLOAT32 = {"norm", "query_norm", "key_norm", "down_norm", "router", "bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [replace(ROUTED, **WITH_ALL, shared_expert_gate=True), LATENT, CONFIGS["critic"]],
    ids=["all", "latent", "critic"],
)
def test_norms_routers_and_values_stay_float32(config):
    """By name, and the head of a critic."""
    kept = IN_FLOAT32 | ({"head"} if config.head == "value" else set())
    half = replace(config, dtype="bfloat16")
    weights = jax.tree.map(lambda x: jnp.full(x.shape, 1 + 2.0**-12, jnp.float32), shapes(config))
    found = jax.tree.leaves_with_path(cast(weights, half))
    wanted = jax.tree.leaves(cast_shapes(half))
    for (path, leaf), like in zip(found, wanted, strict=True):
        exact = path[-1].name in kept
        assert leaf.dtype == like.dtype == (jnp.float32 if exact else jnp.bfloat16)
        assert leaf.shape == like.shape
        np.testing.assert_array_equal(leaf.astype(np.float32), 1 + 2.0**-12 * exact)
    same = cast(weights, config)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (same, weights)), strict=True))
