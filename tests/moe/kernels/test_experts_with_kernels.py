"""Kernels in a layer of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit
from references import dense_reference
from tiers import full_but

from moe.execution import Execution
from moe.experts.dispatch.choice import dispatch
from moe.experts.feed_forward import routed_experts
from moe.experts.grouped_dot import plain_multiply, plain_sum
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.kernels import grouped, layout, rows
from moe.kernels.layout import sorted_layout
from moe.kernels.mosaic import launch
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract


@pytest.mark.slow
def test_everything_between_tokens_and_their_sums_is_a_kernel():
    tokens, k, num_experts, d_model, d_expert = 24, 2, 4, 128, 64

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = Experts(
        router=shaped(d_model, num_experts),
        gate_up=shaped(num_experts, d_model, 2, d_expert),
        down=shaped(num_experts, d_expert, d_model),
    )
    ids, probs = shaped(tokens, k, dtype=jnp.int32), shaped(tokens, k, dtype=jnp.float32)

    def run(weights, x, ids, probs):
        def layer(weights, x, probs):
            return routed_experts(weights, x, ids, probs, implementation="mosaic")[0]

        out, back = jax.vjp(layer, weights, x, probs)
        return out, *back(out)

    # Forward the layout (two), permute, two products and unpermute; backward the reverse of each
    # move, and two products for each.
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])
    text = exported(weights, shaped(tokens, d_model), ids, probs).mlir_module()
    assert text.count("custom_call @mosaic_gpu_v2") == 2 + 2 * 2 + 2 + 4
    assert "stablehlo.sort" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"), [("all_to_all", 13), ("all_gather", 10), ("ragged", 13)]
)
def test_dispatch_over_a_mesh_is_lowered_with_kernels_and_its_gradient(name, kernels):
    mesh = fold_abstract(Layout.parse("tp2 dp4 / ep4 etp2"))
    tokens, k, num_experts, d_model, d_expert = 32, 2, 8, 128, 128

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    spread = P(mesh.ep, None, None, mesh.etp)
    weights = Experts(
        router=shaped(d_model, num_experts),
        gate_up=shaped(num_experts, d_model, 2, d_expert),
        down=shaped(num_experts, d_expert, d_model),
    )
    routing = Routing(shaped(tokens, k, dtype=jnp.int32), shaped(tokens, k, dtype=jnp.float32))

    def total(weights, x, routing):
        out, _ = dispatch(weights, x, routing, mesh, Execution(dispatch=name), product="mosaic")
        return all_sum(jnp.sum(out.astype(jnp.float32)), mesh.axes)

    sharded = jax.shard_map(
        total,
        mesh=mesh.mesh,
        in_specs=(Experts(P(), spread, P(mesh.ep, mesh.etp)), P(mesh.axes), P(mesh.axes)),
        out_specs=P(),
    )
    program = jax.jit(jax.grad(sharded, argnums=(0, 1), allow_int=True))
    # Its format has no promise from XLA, and nothing is kept here.
    ragged = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=[ragged])
    text = exported(weights, shaped(tokens, d_model), routing).mlir_module()
    # The gradient of a plain sum needs neither the second product nor its sums. Where tokens go to
    # their experts' devices, kernels lay them out for that, and back their gradients both ways.
    assert text.count("custom_call @mosaic_gpu_v2") == kernels
    assert "stablehlo.sort" not in text


@pytest.mark.slow
def test_rows_are_spread_and_summed_by_the_kernels_as_without():
    draw = np.random.default_rng(0)
    ids = jnp.asarray(draw.integers(0, 6, (20, 2)), jnp.int32)
    layout = sorted_layout(ids, 5, num_slots=32)
    x, pull = (jnp.asarray(draw.normal(size=(20, 128)), jnp.bfloat16) for _ in range(2))

    def run(implementation):
        def both(x):
            rows = permute_rows(x, layout.tokens, layout.slots, implementation=implementation)
            return unpermute_rows(rows, layout.slots, layout.tokens, implementation=implementation)

        out, back = jit(lambda x: jax.vjp(both, x))(x)
        return out, *jit(lambda pull: back(pull.astype(jnp.float32)))(pull)

    found, expected = run("interpreted"), run("plain")
    assert [x.dtype for x in found] == [jnp.float32, jnp.bfloat16]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7)


TOKENS, K, EXPERTS, D_MODEL, D_EXPERT = 14, 2, 4, 128, 64


def tokens_and_weights():
    """Numbers of half precision, so that nothing but what is computed is rounded. An expert that
    nobody chose, a choice of none, and tokens with two."""
    draw = np.random.default_rng(0)

    def half(*shape):
        return jnp.asarray(draw.normal(size=shape) / shape[-1] ** 0.5, jnp.float16)

    gate_up, down = half(EXPERTS, D_MODEL, 2, D_EXPERT), half(EXPERTS, D_EXPERT, D_MODEL)
    ids = np.stack([draw.permutation([0, 1, 3, 4, 5])[:K] for _ in range(TOKENS)])
    probs = jnp.asarray(draw.random((TOKENS, K)), jnp.float32)
    pull = jnp.asarray(draw.normal(size=(TOKENS, D_MODEL)), jnp.float32)
    return half(TOKENS, D_MODEL), gate_up, down, ids.astype(np.int32), probs, pull


def without_the_last(ids, room):
    """The choices that find room, if choices of the first experts come first, and how many do
    not."""
    flat = np.minimum(ids.reshape(-1), EXPERTS)
    order = np.argsort(flat, kind="stable")
    beyond = [choice for choice in order[room:] if flat[choice] < EXPERTS]
    flat[beyond] = EXPERTS
    return flat.reshape(ids.shape), len(beyond)


DTYPES = jnp.float32, jnp.float16, jnp.float16, jnp.float16, jnp.float32
"""Of the sums and of the gradients of tokens, both matrices and probs."""


def with_gradients(function, x, gate_up, down, ids, probs, pull):
    def layer(x, gate_up, down, probs):
        return function(Experts(gate_up[0, :, 0], gate_up, down), x, ids, probs)

    out, back, overflow = jax.vjp(layer, x, gate_up, down, probs, has_aux=True)
    return overflow, out, *back(pull)


def of_groups(sizes, x):
    """The rows of a product; NaN if the groups have more rows than there are, which a kernel would
    look for past their end."""
    return jnp.where(jnp.sum(sizes) <= x.shape[0], x, jnp.nan)


def multiply_rows(side, rows, weights, sizes):
    return plain_multiply(side, of_groups(sizes, rows), weights, sizes)


def sum_products(rows, others, sizes, dtype):
    return plain_sum(*(of_groups(sizes, x) for x in (rows, others)), sizes).astype(dtype)


def interpreted(monkeypatch, *modules, **how):
    for module in modules:
        monkeypatch.setattr(module, "launch", lambda *of, **options: launch(*of, **options | how))


@pytest.mark.slow
@pytest.mark.parametrize("room", full_but([None, 9], 9))
def test_values_and_gradients_are_those_of_the_dense_reference(room, monkeypatch):
    """What moves rows interpreted, what multiplies them by its twins; with little room too."""
    interpreted(monkeypatch, rows, layout, interpreted=True)
    for twin in (multiply_rows, sum_products):
        monkeypatch.setattr(grouped, twin.__name__, twin)
    x, gate_up, down, ids, probs, pull = tokens_and_weights()

    def experts(*of):
        return routed_experts(*of, num_rows=room, implementation="mosaic")

    found = jit(with_gradients, static_argnums=0)(experts, x, gate_up, down, ids, probs, pull)
    kept, beyond = without_the_last(ids, ids.size if room is None else room)
    wide = (array.astype(jnp.float32) for array in (x, gate_up, down))

    def dense(*of):
        return dense_reference(*of), 0

    expected = jit(with_gradients, static_argnums=0)(dense, *wide, kept, probs, pull)
    assert found[0] == beyond and (beyond > 5) == (room is not None)
    for a, b, dtype in zip(found[1:], expected[1:], DTYPES, strict=True):
        assert a.dtype == dtype
        a = np.asarray(a, np.float32)
        # Rows, hidden units and their gradients are rounded to eleven bits.
        np.testing.assert_allclose(a, b, rtol=2**-8, atol=2**-9 * np.abs(b).max())


@pytest.mark.slow
def test_values_are_those_of_the_dense_reference_in_the_simulator(monkeypatch):
    """The products are simulated too."""
    interpreted(monkeypatch, rows, layout, interpreted=True)
    interpreted(monkeypatch, grouped, simulated=True)
    x, gate_up, down, ids, probs, _ = tokens_and_weights()
    kept, _ = without_the_last(ids, 9)
    wide = (array.astype(jnp.float32) for array in (gate_up[0, :, 0], gate_up, down))
    expected = dense_reference(Experts(*wide), x.astype(jnp.float32), kept, probs)
    weights = Experts(gate_up[0, :, 0], gate_up, down)
    options = {"num_rows": 9, "implementation": "mosaic"}
    found, _ = jit(lambda *of: routed_experts(*of, **options))(weights, x, ids, probs)
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=2**-9 * np.abs(expected).max())
