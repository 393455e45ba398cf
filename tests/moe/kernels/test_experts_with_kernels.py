"""Where a layer of experts meets the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from programs import jit

from moe.experts.feed_forward import routed_experts
from moe.experts.grouped import mosaic
from moe.experts.permutation import spread_rows, sum_rows
from moe.kernels import choice
from moe.kernels.layout import sorted_layout
from moe.weights import Experts


def test_everything_between_tokens_and_their_sums_is_a_kernel_on_hopper(monkeypatch):
    tokens, k, num_experts, d_model, d_expert = 24, 2, 4, 128, 64

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    inward = shaped(num_experts, d_model, d_expert)
    weights = Experts(
        router=shaped(d_model, num_experts),
        gate=inward,
        up=inward,
        down=shaped(num_experts, d_expert, d_model),
    )
    ids, probs = shaped(tokens, k, dtype=jnp.int32), shaped(tokens, k, dtype=jnp.float32)

    def run(weights, x, ids, probs):
        def layer(weights, x, probs):
            return routed_experts(weights, x, ids, probs)[0]

        out, back = jax.vjp(layer, weights, x, probs)
        return out, *back(out)

    monkeypatch.setattr(choice, "has_hopper", lambda: True)
    monkeypatch.setattr(mosaic, "capability", lambda: 9.0)
    # Forward the layout (two), permute, two products and unpermute; backward the reverse of each
    # move, and two products for each.
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])
    text = exported(weights, shaped(tokens, d_model), ids, probs).mlir_module()
    assert text.count("custom_call @mosaic_gpu_v2") == 6 + 2 + 4
    assert "stablehlo.sort" not in text


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
