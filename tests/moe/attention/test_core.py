"""Fused kernels equal the plain implementation, or name what they do not support."""

import functools
import re

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit
from tiers import full_but

from moe.attention import core
from moe.attention.core import core_attention
from moe.kernels.choice import Devices
from moe.ops.mask import Mask, TokenIndices, visible

BATCH, TIME, SOURCE, HEADS, KV_HEADS = 2, 5, 7, 6, 3


def arrays(head_dim, v_head_dim, source, dtype=jnp.float32):
    shapes = [
        (BATCH, TIME, HEADS, head_dim),
        (BATCH, source, KV_HEADS, head_dim),
        (BATCH, source, KV_HEADS, v_head_dim),
        (BATCH, TIME, HEADS, v_head_dim),
    ]
    draw = np.random.default_rng(0)
    return [draw.normal(size=shape).astype(dtype) for shape in shapes]


def mask_of(time, source, single, window=None):
    """Queries in the last places of rows; padding before, after and between the tokens."""
    segments = np.ones((BATCH, source), np.int32)
    segments[0, [0, source - time + 1]] = 0
    segments[1, -1] = 0
    if not single:
        segments[1, 1:4] *= 2
    column = np.broadcast_to(np.arange(source), segments.shape)
    same = (segments[:, :, None] == segments[:, None, :]) & np.tri(source, k=-1, dtype=bool)
    keys = [x.astype(np.int32) for x in (column, same.sum(axis=2), segments)]
    queries = [x[:, source - time :] for x in keys]
    marks = (TokenIndices(*map(jnp.asarray, each)) for each in (queries, keys))
    return Mask(*marks, window, causal=True, single=single)


READINGS = [(TIME, True, None), (SOURCE, True, 2), (SOURCE, False, None), (TIME, False, 2)]
HEAD_DIMS = [(6, 10), (12, 4)]
CASES = [(*sizes, *reading) for reading in READINGS for sizes in HEAD_DIMS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "source", "single", "window"),
    full_but(CASES, CASES[1], CASES[2], CASES[4]),
)
def test_xla_attention_equals_plain(head_dim, v_head_dim, source, single, window):
    """Odd places, heads of sizes that are no multiple of 8, a query that sees nothing."""
    mask = mask_of(TIME, source, single, window)
    seen = np.asarray(jit(lambda q, k: visible(q, k, window).any(axis=-1))(mask.query, mask.key))
    assert not seen.all()
    *given, weight = arrays(head_dim, v_head_dim, source)
    weight = weight * seen[..., None, None]  # what others read is nobody's business

    def run(implementation):
        def total(query, key, value):
            out = core_attention(query, key, value, mask, 0.3, implementation)
            return jnp.sum(jnp.where(weight != 0, out * weight, 0.0)), out

        (_, out), grads = jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*given)
        return out, grads

    (out, grads), (expected, expected_grads) = run("xla"), run("plain")
    assert out.shape == (BATCH, TIME, HEADS, v_head_dim)
    chex.assert_tree_all_finite(out)
    # float32 sums of a dozen terms of order one.
    np.testing.assert_allclose(np.asarray(out)[seen], np.asarray(expected)[seen], atol=2e-6)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-7, atol=5e-6)


def test_none_is_plain_without_a_gpu():
    *given, _ = arrays(6, 10, SOURCE)
    mask = mask_of(TIME, SOURCE, True)
    attend = jit(lambda *given: core_attention(*given, mask))
    plain = jit(lambda *given: core_attention(*given, mask, implementation="plain"))
    np.testing.assert_array_equal(attend(*given), plain(*given))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cudnn",
            r'attention="cudnn" is not supported here: it runs on NVIDIA GPUs, not on \'cpu\'',
        ),
        ("fast", r"attention='fast' is not known: choose among plain, blocked, xla, cudnn, mosaic"),
    ],
)
def test_core_attention_rejects_unsupported_name(name, message):
    *given, _ = arrays(8, 8, SOURCE, jnp.bfloat16)
    mask = mask_of(TIME, SOURCE, True)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *given: core_attention(*given, mask, implementation=name), *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "message"),
    [
        (jnp.float32, 8, "9.0", "it takes bfloat16 and float16, not float32"),
        (jnp.bfloat16, 136, "8.0", "heads of 136 are wider than 128"),
        (jnp.bfloat16, 264, "9.0", "heads of 264 are wider than 256"),
    ],
)
def test_core_attention_rejects_unsupported_gpu(dtype, head_dim, capability, message, monkeypatch):
    device = functools.partial(type, "Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    *given, _ = map(jnp.asarray, arrays(head_dim, 8, SOURCE, dtype))
    mask = mask_of(TIME, SOURCE, True)
    with pytest.raises(ValueError, match=message):
        core_attention(*given, mask, implementation="cudnn")
    np.testing.assert_array_equal(
        core_attention(*given, mask), core_attention(*given, mask, implementation="plain")
    )


@pytest.fixture
def hopper(monkeypatch):
    """A machine that says it has one."""
    device = functools.partial(type, "Device", (), {"compute_capability": "9.0"})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )


def rows_of(batch, time, source, window=None, causal=True, single=True):
    """The shapes of a mask, and no numbers."""
    query, key = (
        TokenIndices(*[jax.ShapeDtypeStruct((batch, size), jnp.int32)] * 3)
        for size in (time, source)
    )
    return Mask(query, key, window, causal, single)


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        (rows_of(1, 2**17, 2**17), "cudnn"),
        (rows_of(1, 2**16, 2**17, window=4096), "cudnn"),
        # Parts of rows and packed ones, whose masks are small enough, or not.
        (rows_of(1, 2**13, 2**13, single=False), "cudnn"),
        (rows_of(1, 2**14, 2**14, single=False), "mosaic"),
        (rows_of(1, 2**12, 2**14, causal=False), "cudnn"),
        (rows_of(8, 2**12, 2**14, causal=False), "mosaic"),
        (rows_of(1, 64, 64, jax.ShapeDtypeStruct((), jnp.int32)), "cudnn"),
        # Few queries: a mask is less than computing all the others would be.
        (rows_of(1, 2**14, 2**16), "cudnn"),
    ],
)
def test_default_attention_on_gpu_fits_memory(mask, chosen, hopper):
    (batch, time), (_, source) = mask.query.column.shape, mask.key.column.shape
    query, value = (
        jax.ShapeDtypeStruct((batch, size, 4, 64), jnp.bfloat16) for size in (time, source)
    )
    for sinks in (None, jax.ShapeDtypeStruct((4,), jnp.float32)):
        for capability, expected in ((9.0, chosen), (8.0, chosen.replace("mosaic", "blocked"))):
            found, devices = [], Devices("gpu", capability)

            def choose(query, value, sinks, found=found, devices=devices):
                name = core._select_implementation(query, value, value, mask, sinks, devices)
                found.append(name)

            jax.eval_shape(choose, query, value, sinks)
            assert found == [expected]


def test_a_mask_that_is_too_large_is_refused(hopper):
    def read(query, key, mask):
        return core_attention(query, key, key, mask, implementation="cudnn")

    shape = jax.ShapeDtypeStruct((1, 2**14, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"mask has 268435456 elements.*choose \"blocked\""):
        jax.eval_shape(read, shape, shape, rows_of(1, 2**14, 2**14, single=False))


LENGTHS = [
    (96, True, 48, False),
    (96, True, None, False),
    (96, False, 48, False),
    # A number of places that the gradient's kernel does not take.
    (97, True, None, False),
    # Two sinks, before 48 tokens each, or one.
    (96, True, 48, True),
    (96, True, None, True),
    (96, False, 48, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("time", "single", "window", "with_sinks"), LENGTHS)
def test_lengths_need_no_mask_on_cuda(time, single, window, with_sinks, hopper):
    """By lowering: the kernels of both passes, and what they are given."""
    kernels = ["__cudnn$fmha" + name for name in ("Softmax", "ScaleBiasSoftmax")]

    def step(query, key, value, mask):
        sinks = query[0, 0, :, 0].astype(jnp.float32) if with_sinks else None

        def total(*given):
            return jnp.sum(core_attention(*given, mask, sinks=sinks).astype(jnp.float32))

        return jax.grad(total, (0, 1, 2))(query, key, value)

    shapes = [jax.ShapeDtypeStruct((2, time, n, 64), jnp.bfloat16) for n in (8, 4, 4)]
    mask = rows_of(2, time, time, window, single=single)
    calls = [
        jax.export.DisabledSafetyCheck.custom_call(k + b) for k in kernels for b in ("", "Backward")
    ]
    program = jax.export.export(
        jax.jit(lambda *given: step(*given[:3], mask.replace(query=given[3], key=given[4]))),
        platforms=["cuda"],
        disabled_checks=calls,
    )(*shapes, mask.query, mask.key).mlir_module()
    kernel = kernels[0 if single else 1]
    used = re.findall(r"@(__cudnn\$\w+)", program)
    assert sorted(used) == [kernel, kernel + "Backward"]
    # Nothing is as large as queries times keys, but with a mask.
    among = (2 if single and window else 1) if with_sinks else 0
    assert single != any(f"{n}x{n}x" in program for n in range(time, time + among + 2))
    given = re.findall(r"sliding_window_length\D*22: (\d+)", program)
    assert given == [str(window + with_sinks if single and window else 0)] * 2
