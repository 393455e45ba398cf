"""Products with adapters equal products with merged weights, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.adapters import Adapted, merge_adapters, select_trained
from moe.architecture.lora import TARGETS, Lora
from moe.attention.projections import heads, join_heads
from moe.config import ModelConfig
from moe.experts.feed_forward import routed_experts
from moe.weights import num_trained_parameters, shapes, table, targets_of

LORA = Lora(rank=3, alpha=4.5, targets=TARGETS, rank_stabilised=True)
CONFIG = ModelConfig(
    11,
    num_layers=2,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=4,
    d_expert=7,
    d_ff=5,
    num_dense_layers=1,
    dense_d_ff=9,
    lora=LORA,
)
TOKENS, CHOICES = 13, 3


def of_layer():
    """A layer with random weights, and the same merged."""
    draw = np.random.default_rng(2)
    weights = jax.tree.map(
        lambda leaf: (0.4 * draw.normal(size=leaf.shape)).astype(np.float32), shapes(CONFIG)
    )
    both = weights, jit(lambda weights: merge_adapters(weights, table(CONFIG)))(weights)
    return [jax.tree.map(lambda x: x[0], given.layers) for given in jax.device_get(both)]


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(3).normal(size=shape).astype(np.float32))


def of_query(layer):
    return heads(numbers(TOKENS, 10), layer.attention.query)


def of_out(layer):
    return join_heads(numbers(TOKENS, 4, 6), layer.attention.out)


def of_experts(layer):
    experts = jnp.argsort(numbers(TOKENS, 4), axis=1)[:, :CHOICES].astype(jnp.int32)
    probs = jax.nn.softmax(numbers(TOKENS, CHOICES))
    return routed_experts(layer.experts, numbers(TOKENS, 10), experts, probs)[0]


@pytest.mark.parametrize("product", [of_query, of_out])
def test_a_product_is_that_with_merged_weights(product):
    layer, plain = of_layer()
    found, expected = (jit(product)(given) for given in (layer, plain))
    # float32 sums of at most ten products of numbers near 1, added up in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_experts_are_those_of_merged_weights_and_gradients_follow_by_the_chain_rule():
    layer, plain = of_layer()
    pull = numbers(TOKENS, 10)

    def loss(layer):
        return jnp.sum(of_experts(layer) * pull)

    value, found = jit(jax.value_and_grad(loss))(layer)
    expected, by_plain = jit(jax.value_and_grad(loss))(plain)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for name in ("gate_up", "down"):
        own, by_weight = getattr(layer.experts, name), getattr(by_plain.experts, name)

        @jit
        def back(a, b, by_weight, scale=own.scale):
            def added(a, b):
                return scale * jnp.einsum("eir,er...->ei...", a, b)

            return jax.vjp(added, a, b)[1](by_weight)

        for got, wanted in zip(
            (getattr(found.experts, name).a, getattr(found.experts, name).b),
            back(own.a, own.b, by_weight),
            strict=True,
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
            assert np.abs(wanted).max() > 0.1


def test_the_table_has_adapters_for_every_target():
    statement = table(CONFIG)
    assert targets_of(CONFIG) == TARGETS
    dense = statement.first_layers.dense.gate_up
    assert isinstance(dense, Adapted)
    assert (dense.a.axes, dense.b.axes) == (
        "first_layer half d_model lora_rank",
        "first_layer half lora_rank dense_d_ff",
    )
    stacked = statement.layers.experts.gate_up
    assert (stacked.a.axes, stacked.b.axes) == (
        "layer expert d_model lora_rank",
        "layer expert lora_rank half d_expert",
    )
    assert stacked.base.frozen and not stacked.a.frozen and stacked.scale == 4.5 / 3**0.5
    learned = select_trained(shapes(CONFIG), statement)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(learned))
    assert num_trained_parameters(CONFIG) == numbers
    attention = 2 * 3 * (4 * 10 + 2 * 24 + 2 * 12)  # of query and out, of key and value
    dense_and_shared = 3 * (3 * 10 + 3 * 9) + 3 * (3 * 10 + 3 * 5)
    experts = 4 * 3 * (10 + 14 + 7 + 10)
    assert numbers == attention + dense_and_shared + experts + 3 * (10 + 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "lora_rank=0 must be at least 1"),
        ({"alpha": 0.0}, "lora_alpha=0.0 must be above 0"),
        (
            {"targets": ("attention", "router")},
            "lora_targets='attention,router' must be one or more",
        ),
    ],
)
def test_lora_rejects_invalid_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        Lora(**{"rank": 2, "alpha": 4.0, "targets": ("attention",), **changes})
