"""Experts whose SwiGLU is in the kernels of their products, against those whose is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.experts.fused import fused_experts
from moe.experts.gated import apply_gate
from moe.experts.grouped_dot import grouped_dot
from moe.remat import rematerialise

KERNEL = "custom_call @mosaic_gpu_v2"
TRANSPOSES = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
ROWS, D_MODEL, D_EXPERT, SIZES = 90, 64, 128, (50, 0, 21)


def given():
    draw = np.random.default_rng(0)
    shapes = {
        (ROWS, D_MODEL): jnp.bfloat16,
        (len(SIZES), D_MODEL, 2, D_EXPERT): jnp.float32,
        (len(SIZES), D_EXPERT, D_MODEL): jnp.float32,
    }
    rows, *weights = (jnp.asarray(draw.normal(size=s) / s[1] ** 0.5, d) for s, d in shapes.items())
    probs = jnp.asarray(draw.random(ROWS), jnp.float32)
    return rows, *weights, probs, jnp.asarray(draw.normal(size=(ROWS, D_MODEL)), jnp.bfloat16)


def in_two_products(rows, gate_up, down, probs, sizes):
    hidden = apply_gate(grouped_dot(rows, gate_up, sizes), probs)
    return grouped_dot(hidden, down, sizes)


def with_gradients(function):
    *operands, pull = given()
    sizes = jnp.asarray(SIZES, jnp.int32)
    out, back = jax.vjp(lambda *of: function(*of, sizes), *operands)
    return out, *back(pull)


@pytest.mark.slow
@pytest.mark.skipif(
    not TRANSPOSES, reason="the simulator of jax 0.10 knows no transposed reference"
)
def test_values_and_gradients_are_those_of_two_products():
    found = with_gradients(lambda *of: fused_experts(*of, simulated=True))
    expected = with_gradients(in_two_products)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        # In half precision hidden units and their gradients are rounded, not at the same places:
        # a few parts in 2^8 of what is summed.
        np.testing.assert_allclose(a, b, rtol=2**-5, atol=2**-6 * np.abs(b).max())
    assert not np.asarray(found[0][sum(SIZES) :], np.float32).any()


def exported(function, *arguments):
    return jax.export.export(jax.jit(function), platforms=["cuda"])(*arguments).mlir_module()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_it_is_two_kernels_there_and_four_back_on_cuda(remat):
    """Where products are kept, neither of the two runs again for the way back."""

    def run(rows, gate_up, down, probs, pull, sizes):
        function = rematerialise(lambda *of: fused_experts(*of, sizes), remat)
        out, back = jax.vjp(function, rows, gate_up, down, probs)
        return out, *back(pull)

    text = exported(run, *given(), jnp.asarray(SIZES, jnp.int32))
    # Hidden units and their product; their gradient, that of the rows, and of both weights.
    assert text.count(KERNEL) == 2 + 4
    assert "stablehlo.dot_general" not in text


@pytest.mark.slow
def test_what_the_kernels_cannot_serve_is_refused():
    rows, gate_up, down, probs, _ = given()
    sizes = jnp.asarray(SIZES, jnp.int32)
    with pytest.raises(ValueError, match=r"\"mosaic_fused\" of routed_experts .* rows of float32"):
        fused_experts(rows.astype(jnp.float32), gate_up, down, probs, sizes)
    with pytest.raises(ValueError, match=r"\"mosaic_fused\" .* matrices of 64 x 100 .* of 64"):
        fused_experts(rows, gate_up[..., :100], down[:, :100], probs, sizes)
    with pytest.raises(ValueError, match=r"runs on NVIDIA GPUs .* lowered for cpu"):
        fused_experts(rows, gate_up, down, probs, sizes)
