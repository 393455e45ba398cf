"""Experts that read tokens and what pulls at them where they lie, against those of copies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import simulates_transposes

from moe.experts.fused import fused_experts, gathered_experts
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.kernels.layout import SortedLayout, sorted_layout
from moe.remat import rematerialise

KERNEL = "custom_call @mosaic_gpu_v2"
SLOTS, WIDTH, HIDDEN, SIZES = 90, 128, 64, (50, 0, 21)


def given(room=SLOTS):
    """Tokens in float32 with two choices each, some of no expert, and an expert of no token."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    ids = np.repeat(np.arange(len(SIZES)), SIZES)
    ids = np.pad(ids, (0, SLOTS - len(ids)), constant_values=len(SIZES))
    ids = jnp.asarray(draw.permutation(ids).reshape(-1, 2), jnp.int32)
    layout = sorted_layout(ids, len(SIZES), num_slots=room)
    sizes = jnp.diff(jnp.minimum(jnp.cumsum(layout.sizes), room), prepend=0)
    x, pull = normal(SLOTS // 2, WIDTH), normal(SLOTS // 2, WIDTH)
    gate_up = normal(len(SIZES), WIDTH, 2 * HIDDEN).reshape(len(SIZES), WIDTH, 2, HIDDEN)
    down, probs = normal(len(SIZES), HIDDEN, WIDTH), jnp.asarray(draw.random(room), jnp.float32)
    return (x, gate_up, down, probs), layout, sizes, pull


@pytest.mark.slow
@simulates_transposes
@pytest.mark.parametrize(("room", "scattered"), [(SLOTS, True), (60, False)])
def test_values_and_gradients_are_those_of_rows_that_are_spread_and_summed(room, scattered):
    """Tokens in float32, as gathered from other devices, products in bfloat16: every sum is of the
    same rows in the same order. With little room some choices are left out."""
    operands, layout, sizes, pull = given(room)

    def spread(x, *of):
        rows = permute_rows(x, layout.tokens, layout.slots, jnp.bfloat16)
        out = fused_experts(rows, *of, sizes, simulated=True)
        return unpermute_rows(out, layout.slots, layout.tokens)

    def gathered(x, *of):
        options = {"dtype": jnp.bfloat16, "scattered": scattered, "simulated": True}
        return gathered_experts(x, layout, *of, **options)

    found, expected = (
        (out, *back(pull)) for out, back in (jax.vjp(way, *operands) for way in (gathered, spread))
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def exported(scattered, remat, tokens, k, slots, width, hidden, experts):
    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(x, gate_up, down, probs, pull, layout):
        function = rematerialise(
            lambda x, layout, *of: gathered_experts(x, layout, *of, scattered=scattered),
            remat,
        )
        out, back = jax.vjp(lambda x, *of: function(x, layout, *of), x, gate_up, down, probs)
        return out, *back(pull)

    integers = [shaped(*s, dtype=jnp.int32) for s in ((slots,), (tokens, k), (experts,))]
    program = jax.export.export(jax.jit(run), platforms=["cuda"])
    return program(
        shaped(tokens, width),
        shaped(experts, width, 2, hidden),
        shaped(experts, hidden, width),
        shaped(slots, dtype=jnp.float32),
        shaped(tokens, width, dtype=jnp.float32),
        SortedLayout(*integers),
    ).mlir_module()


SHAPES = {
    "small": (40, 4, 168, 256, 64, 3),
    "little room": (40, 4, 136, 256, 64, 3),
    # Whole tiles of each expert, so that there are more slots than choices.
    "Qwen3-30B-A3B": (32768, 8, 278528, 2048, 768, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True], ids=["gathered", "scattered"])
@pytest.mark.parametrize(
    ("name", "remat"),
    [("small", "none"), ("little room", "selective"), ("Qwen3-30B-A3B", "selective")],
)
def test_tokens_and_what_pulls_at_them_are_copied_nowhere_on_cuda(name, remat, scattered):
    """Two kernels there and four back, and a sum over a token's slots each way: of rows in the
    order of experts the two products that are summed write theirs, and nothing else does."""
    tokens, k, slots, width, *_ = SHAPES[name]
    text = exported(scattered, remat, *SHAPES[name])
    assert text.count(KERNEL) == 2 + 4 + 2
    sorted_rows, in_places = (f"-> tensor<{n}x{width}xbf16>" for n in (slots, tokens * k))
    written = [line for line in text.splitlines() if KERNEL in line]
    assert sum(in_places in line for line in written) == (2 if scattered else 0)
    assert sum(sorted_rows in line for line in written) == (0 if scattered else 2)
    assert not [line for line in text.splitlines() if sorted_rows in line and KERNEL not in line]
    assert not (scattered and f"tensor<{slots}x{width}x" in text)


def test_what_the_kernels_cannot_serve_is_refused():
    (x, *others), layout, *_ = given()
    for scattered, name in ((False, "mosaic_gathered"), (True, "mosaic_scattered")):
        with pytest.raises(ValueError, match=rf"\"{name}\" of routed_experts .* rows of float32"):
            jax.eval_shape(partial(gathered_experts, scattered=scattered), x, layout, *others)
