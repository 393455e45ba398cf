"""The router's choice: the kernel against its plain twin, and that against the router."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from tiers import full_but
from whole_network import loss_and_gradient

from benchmarks import kernel_cases
from moe.cache import StepTokens
from moe.config import Model, ModelConfig
from moe.decoding import packed_step
from moe.execution import Execution
from moe.kernels import routing
from moe.kernels.routing import Rule, route
from moe.router import layer
from moe.router.routing import topk_routing
from moe.weights import Experts, shapes

TOKENS, (EXPERTS, MORE) = kernel_cases.ROUTED, kernel_cases.ROUTES
RULES = {name: Rule(**fields) for name, fields in kernel_cases.RULES.items()}


def operands(experts=EXPERTS):
    draw = np.random.default_rng(0)
    logits, bias = 3 * draw.normal(size=(TOKENS, experts)), 0.1 * draw.normal(size=experts)
    # Two columns alike: among equals the first is chosen.
    logits[:, 5] = logits[:, 2]
    bias[5] = bias[2]
    weights = draw.integers(0, 3, TOKENS)
    return tuple(x.astype(np.float32) for x in (logits, bias, weights))


def pulled(experts, k):
    draw = np.random.default_rng(1)
    shapes = (TOKENS, k), (TOKENS, experts)
    return tuple(draw.normal(size=shape).astype(np.float32) for shape in shapes)


def with_gradient(implementation, rule, experts=EXPERTS):
    @jit
    def both(logits, bias, weights, pull):
        def run(logits):
            chosen = route(logits, bias, weights, rule, implementation=implementation)
            return (chosen.probs, chosen.probabilities), (chosen.experts, chosen.counts)

        out, back, rest = jax.vjp(run, logits, has_aux=True)
        return *out, *rest, *back(pull)

    return jax.device_get(both(*operands(experts), pulled(experts, rule.k)))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(RULES, "softmax of the chosen", "sigmoid in groups"))
def test_the_plain_twin_is_the_router(name):
    rule = RULES[name]
    config = ModelConfig(
        vocab_size=8,
        num_layers=1,
        d_model=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        d_expert=8,
        experts_per_token=rule.k,
        router_scores="sigmoid" if rule.sigmoid else "softmax",
        softmax_after_topk=rule.after_topk,
        renormalise=rule.renormalise,
        routed_scaling=rule.scaling,
        num_expert_groups=rule.groups,
        expert_groups_per_token=rule.open_groups,
    )
    logits, bias, weights = operands()

    @jit
    def router(logits, bias, pull):
        def run(logits):
            routing, probabilities = topk_routing(logits, jnp.ones(TOKENS, bool), config, bias=bias)
            return (routing.probs, probabilities), routing.experts

        out, back, experts = jax.vjp(run, logits, has_aux=True)
        return *out, experts, *back(pull)

    expected = jax.device_get(router(logits, bias, pulled(EXPERTS, rule.k)))
    probs, probabilities, chosen, counts, gradient = with_gradient("plain", rule)
    for a, b in zip((probs, probabilities, chosen, gradient), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    counted = np.zeros(EXPERTS)
    for token, row in enumerate(expected[2]):
        counted[row] += weights[token]
    np.testing.assert_array_equal(counts, counted)


@pytest.mark.slow
@pytest.mark.parametrize("experts", full_but([EXPERTS, MORE], EXPERTS))
@pytest.mark.parametrize("name", full_but(RULES, "softmax", "sigmoid in groups"))
def test_the_kernel_equals_the_plain_twin(name, experts):
    found, expected = (
        with_gradient(implementation, RULES[name], experts)
        for implementation in ("interpreted", "plain")
    )
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        # Choices and counts are equal, what is computed to a few roundings of float32.
        exact = index in (2, 3)
        np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


def kernels(jaxpr):
    """Calls of kernels in a traced program, inner programs included."""
    return sum(
        (equation.primitive.name == "needs_cuda")
        + sum(kernels(inner) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


NETWORK = ModelConfig(
    vocab_size=8,
    num_layers=1,
    d_model=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    num_experts=8,
    experts_per_token=2,
    d_expert=8,
    global_balance_coef=0.1,
    execution=Execution(router="mosaic"),
)


@pytest.mark.slow
@pytest.mark.parametrize("remat", full_but(["none", "selective", "projections"], "selective"))
def test_the_backward_pass_does_not_choose_again(remat):
    config = replace(NETWORK, execution=replace(NETWORK.execution, remat=remat))
    piece = jax.ShapeDtypeStruct((2, 8), jnp.int32), jax.ShapeDtypeStruct((2, 8), bool)
    traced = jax.make_jaxpr(loss_and_gradient(config, mesh_of("dp1")))(shapes(config), piece)
    assert kernels(traced.jaxpr) == 1


def test_load_without_training_is_counted_by_kernel(monkeypatch):
    """Its twin in its place, which counts as it does."""
    mesh, draw = mesh_of("dp1"), np.random.default_rng(2)
    router, h = (draw.normal(size=shape).astype(np.float32) for shape in ((8, 8), (12, 8)))
    packed = packed_step(StepTokens(*jnp.zeros((2, 12), int), jnp.arange(12) % 3 > 0))

    def load(config):
        def run(router, h):
            # Products of the router alone: its experts are not asked for.
            return layer.route(Experts(router, h, h), h, packed, Model(config, mesh))[1].load

        sharded = jax.shard_map(run, mesh=mesh.mesh, in_specs=(P(), P()), out_specs=P(mesh.axes))
        return jit(sharded)(router, h)

    expected = load(replace(NETWORK, execution=Execution()))
    assert jnp.sum(expected) == 16
    monkeypatch.setattr(routing, "_kernel", lambda *of, interpreted: routing._plain(*of))
    monkeypatch.delattr(layer, "assignments")
    np.testing.assert_array_equal(load(NETWORK), expected)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [16, 128, 256])
@pytest.mark.parametrize("name", RULES)
def test_it_is_one_kernel_on_cuda(name, experts):
    def run(logits, bias, weights):
        return route(logits, bias, weights, RULES[name], implementation="mosaic")

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(experts)]
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(*shapes).mlir_module()
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert "stablehlo.sort" not in text and "top_k" not in text


def test_routing_kernel_rejects_unsupported_operands():
    by_kernel = jax.jit(partial(route, rule=RULES["softmax"], implementation="mosaic"))
    for experts in (12, 512):
        with pytest.raises(
            ValueError, match=rf"route is not supported: .* among {experts} experts"
        ):
            by_kernel(*operands(experts))
    with pytest.raises(ValueError, match=r"route runs on NVIDIA GPUs .* lowered for cpu"):
        by_kernel(*operands())
