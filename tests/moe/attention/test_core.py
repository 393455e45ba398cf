"""The fused kernels read what the plain twin reads, and say so where they cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.attention.core import core_attention
from moe.attention.mask import Marks, Mask, visible

BATCH, TIME, SOURCE, HEADS, KV_HEADS = 2, 5, 7, 6, 3


def arrays(head_dim, v_head_dim, source, dtype=jnp.float32):
    shapes = [
        (BATCH, TIME, HEADS, head_dim),
        (BATCH, source, KV_HEADS, head_dim),
        (BATCH, source, KV_HEADS, v_head_dim),
        (BATCH, TIME, HEADS, v_head_dim),
    ]
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def mask_of(time, source, single, window=None):
    """Queries in the last places of rows; padding before, after and between the tokens."""
    segments = np.ones((BATCH, source), np.int32)
    segments[0, [0, source - time + 1]] = 0
    segments[1, -1] = 0
    if not single:
        segments[1, 1:4] *= 2
    column = np.broadcast_to(np.arange(source), segments.shape)
    same = (segments[:, :, None] == segments[:, None, :]) & np.tri(source, k=-1, dtype=bool)
    keys = Marks(*(jnp.asarray(x, jnp.int32) for x in (column, same.sum(axis=2), segments)))
    queries = Marks(*(x[:, source - time :] for x in keys))
    return Mask(queries, keys, window, causal=True, single=single)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(6, 10), (12, 4)])
@pytest.mark.parametrize(
    ("source", "single", "window"),
    [(TIME, True, None), (SOURCE, True, 2), (SOURCE, False, None), (TIME, False, 2)],
)
def test_xla_reads_what_plain_reads(head_dim, v_head_dim, source, single, window):
    """Odd places, heads of sizes that are no multiple of 8, a query that sees nothing."""
    mask = mask_of(TIME, source, single, window)
    seen = np.asarray(visible(mask.query, mask.key, window).any(axis=-1))
    assert not seen.all()
    *given, weight = arrays(head_dim, v_head_dim, source)
    weight = jnp.where(seen[..., None, None], weight, 0)  # what others read is nobody's business

    def run(implementation):
        def total(query, key, value):
            out = core_attention(query, key, value, mask, 0.3, implementation)
            return jnp.sum(jnp.where(weight != 0, out * weight, 0.0)), out

        (_, out), grads = jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*given)
        return out, grads

    (out, grads), (expected, expected_grads) = run("xla"), run("plain")
    assert out.shape == (BATCH, TIME, HEADS, v_head_dim)
    assert np.all(np.isfinite(out))
    # float32 sums of a dozen terms of order one.
    np.testing.assert_allclose(np.asarray(out)[seen], np.asarray(expected)[seen], atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)


def test_none_is_plain_without_a_gpu():
    *given, _ = arrays(6, 10, SOURCE)
    mask = mask_of(TIME, SOURCE, True)
    np.testing.assert_array_equal(
        core_attention(*given, mask), core_attention(*given, mask, implementation="plain")
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cudnn", r'attention="cudnn" cannot serve here: it runs on NVIDIA GPUs, not on \'cpu\''),
        ("fast", r"attention='fast' is not known: choose among plain, blocked, xla, cudnn"),
    ],
)
def test_what_cannot_serve_is_refused(name, message):
    *given, _ = arrays(8, 8, SOURCE, jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        core_attention(*given, mask_of(TIME, SOURCE, True), implementation=name)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "message"),
    [
        (jnp.float32, 8, "9.0", "it takes bfloat16 and float16, not float32"),
        (jnp.bfloat16, 136, "8.0", "heads of 136 are wider than 128"),
        (jnp.bfloat16, 264, "9.0", "heads of 264 are wider than 256"),
    ],
)
def test_what_a_gpu_cannot_serve_is_refused(dtype, head_dim, capability, message, monkeypatch):
    device = functools.partial(type, "Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    *given, _ = arrays(head_dim, 8, SOURCE, dtype)
    mask = mask_of(TIME, SOURCE, True)
    with pytest.raises(ValueError, match=message):
        core_attention(*given, mask, implementation="cudnn")
    np.testing.assert_array_equal(
        core_attention(*given, mask), core_attention(*given, mask, implementation="plain")
    )
