"""Where a layer of experts meets the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit

from moe.experts.dispatch.choice import dispatch
from moe.experts.feed_forward import routed_experts
from moe.experts.permutation import spread_rows, sum_rows
from moe.kernels.layout import sorted_layout
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["mosaic", "mosaic_fused", "mosaic_gathered"])
def test_everything_between_tokens_and_their_sums_is_a_kernel(implementation):
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
            return routed_experts(weights, x, ids, probs, implementation=implementation)[0]

        out, back = jax.vjp(layer, weights, x, probs)
        return out, *back(out)

    # Forward the layout (two), permute, two products and unpermute; backward the reverse of each
    # move, and two products for each. With SwiGLU in the products there are no more of them, and
    # where the first gathers its rows no permute.
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])
    text = exported(weights, shaped(tokens, d_model), ids, probs).mlir_module()
    forward = 5 if implementation == "mosaic_gathered" else 6
    assert text.count("custom_call @mosaic_gpu_v2") == forward + 2 + 4
    assert "stablehlo.sort" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("all_to_all", "mosaic"),
        ("all_gather", "mosaic"),
        ("ragged", "mosaic"),
        ("all_gather", "mosaic_gathered"),
    ],
)
def test_dispatch_over_a_mesh_is_lowered_with_kernels_and_its_gradient(name, product):
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
        out, _ = dispatch(weights, x, routing, mesh, implementation=name, product=product)
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
    # The gradient of a plain sum needs neither the second product nor its sums.
    kernels = 11 if product == "mosaic_gathered" else 12
    assert text.count("custom_call @mosaic_gpu_v2") >= kernels - 2


def test_rows_are_spread_and_summed_by_the_kernels_as_without():
    draw = np.random.default_rng(0)
    ids = jnp.asarray(draw.integers(0, 6, (20, 2)), jnp.int32)
    layout = sorted_layout(ids, 5, num_slots=32)
    x, pull = (jnp.asarray(draw.normal(size=(20, 128)), jnp.bfloat16) for _ in range(2))

    def run(implementation):
        def both(x):
            rows = spread_rows(x, layout.tokens, layout.places, implementation=implementation)
            return sum_rows(rows, layout.places, layout.tokens, implementation=implementation)

        out, back = jit(lambda x: jax.vjp(both, x))(x)
        return out, *jit(lambda pull: back(pull.astype(jnp.float32)))(pull)

    found, expected = run("interpreted"), run("plain")
    assert [x.dtype for x in found] == [jnp.float32, jnp.bfloat16]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7)
