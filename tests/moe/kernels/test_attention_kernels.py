"""FlashAttention for training: the kernels, simulated, against the plain twin, and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of
from simulator import simulates_transposes
from tiers import full_but

from benchmarks.kernel_cases import ATTENDED, marks
from moe.attention import blocked
from moe.attention.core import core_attention
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.kernels import attention as attention_kernels
from moe.kernels import choice, mosaic
from moe.kernels.attention.blocks import block_mask, visit_table
from moe.kernels.attention.forward import attend
from moe.kernels.attention.gradient import attend_gradient
from moe.ops.attention import dot_do_o, plain_attention
from moe.ops.mask import Mask, TokenIndices, visible
from moe.tokens.packing import pack_rows

KERNEL = "custom_call @mosaic_gpu_v2"
BLOCK = 128
SCALE = 0.1


def mask_of(case):
    keys = [jnp.asarray(x) for x in marks(case)]
    queries = [x[:, slice(*case.columns)] for x in keys]
    return Mask(TokenIndices(*queries), TokenIndices(*keys), case.window)


def given(case, dtype=jnp.bfloat16):
    """Queries, keys, values and the gradient of the result."""
    draw, (first, last) = np.random.default_rng(0), case.columns
    front, source = (len(case.rows), case.kv_heads), marks(case)[0].shape[1]
    shapes = [
        (*front, case.group, last - first, case.head_dim),
        (*front, source, case.head_dim),
        (*front, source, case.v_head_dim),
        (*front, case.group, last - first, case.v_head_dim),
    ]
    return [draw.normal(size=shape).astype(dtype) for shape in shapes]


@jit
def seen_by(mask):
    return visible(mask.query, mask.key, mask.window)


@simulates_transposes
@pytest.mark.parametrize("name", full_but(ATTENDED, "window"))
def test_the_kernels_equal_the_plain_twin(name):
    case = ATTENDED[name]
    query, key, value, pull = given(case)
    mask = mask_of(case)
    seen = np.asarray(seen_by(mask))
    # What none of them sees, before the first block of which a query does and after the last.
    used = seen.any(axis=(0, 1)).nonzero()[0]
    hidden = np.ones(key.shape[2], bool)
    hidden[used[0] // BLOCK * BLOCK : (used[-1] // BLOCK + 1) * BLOCK] = False
    assert hidden.any() == (name in ("segments", "window"))
    spoilt = [np.where(hidden[:, None], np.nan, x.astype(np.float32)) for x in (key, value)]
    spoilt = [x.astype(jnp.bfloat16) for x in spoilt]
    twins = [x.astype(np.float32) for x in (query, key, value, pull)]
    known = partial(blocked.attend, scale=SCALE), partial(blocked.attend_gradient, scale=SCALE)
    expected, expected_sum = jit(known[0])(*twins[:3], mask)
    out, log_sum = jit(partial(attend, scale=SCALE, simulated=True))(query, *spoilt, mask)
    assert out.dtype == log_sum.dtype == jnp.float32
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(log_sum))
    sees = np.broadcast_to(seen.any(axis=2)[:, None, None], log_sum.shape)
    # Powers are rounded to eight bits, and nothing else: the sum of them is not.
    np.testing.assert_allclose(out[sees], expected[sees], atol=2**-7)
    np.testing.assert_allclose(log_sum[sees], expected_sum[sees], atol=1e-5)

    softmax_d = jit(dot_do_o)(expected, twins[3])
    found = jit(partial(attend_gradient, scale=SCALE, simulated=True))(
        query, *spoilt, mask, expected_sum, softmax_d, pull
    )
    wanted = jit(known[1])(*twins[:3], mask, expected_sum, softmax_d, twins[3])
    for own, other in zip(found, wanted, strict=True):
        assert own.shape == other.shape and own.dtype == jnp.float32
        # So are powers and the scores' gradients, of which up to 300 are summed.
        np.testing.assert_allclose(own, other, atol=2**-8 * np.abs(other).max())
    assert not np.any(found[0][~sees])
    assert not np.any(np.asarray(found[1])[:, :, hidden])


@pytest.mark.slow
@simulates_transposes
def test_core_attention_by_the_kernels_with_sinks(monkeypatch):
    """Rounded once, sinks in the softmax and their gradient too, half precision of 16 bits."""
    case = ATTENDED["segments"]
    mask = mask_of(case)
    query, key, value, pull = given(case, np.float16)
    query, pull = (np.moveaxis(x[:, 0], 1, 2) for x in (query, pull))
    key, value = (np.swapaxes(x, 1, 2) for x in (key, value))
    sinks = np.array([0.5, -1.0], np.float32)
    # What queries that see nothing get is nobody's business.
    pull = pull * np.asarray(seen_by(mask).any(axis=2))[..., None, None].astype(np.float16)

    def outcome(attention, *given):
        out, back = jax.vjp(attention, *given)
        return out, *back(pull.astype(out.dtype))

    for kernel in ("attend", "attend_gradient"):
        simulated = partial(getattr(attention_kernels, kernel), simulated=True)
        monkeypatch.setattr(attention_kernels, kernel, simulated)
    attention_kernels._rounding.cache_clear()
    run = jit(partial(outcome, lambda *x: core_attention(*x[:3], mask, SCALE, "mosaic", x[3])))
    found = run(query, key, value, sinks)
    attention_kernels._rounding.cache_clear()
    wide = (x.astype(np.float32) for x in (query, key, value))
    seen = visible(mask.query, mask.key, mask.window)
    twin = jit(partial(outcome, lambda *x: plain_attention(*x[:3], seen, SCALE, x[3])))
    expected = twin(*wide, sinks)
    assert [x.dtype for x in found] == [np.float16] * 4 + [np.float32]
    sees = np.asarray(seen.any(axis=2))
    np.testing.assert_allclose(found[0][sees], expected[0][sees], atol=2**-9)
    for own, other in zip(found[1:], expected[1:], strict=True):
        assert np.abs(other).max() > 0.1
        # Eleven bits of powers, results and the scores' gradients.
        np.testing.assert_allclose(own, other, atol=2**-9 * np.abs(other).max())


@pytest.mark.slow
@simulates_transposes
def test_no_block_is_overwritten_while_it_is_read(monkeypatch):
    """By the simulator's detector of races, which knows what barriers order."""
    gpu = mosaic.mosaic_gpu()
    detector = gpu.InterpretGPUParams(out_of_bounds_reads="uninitialized", detect_races=True)
    monkeypatch.setattr(mosaic, "_simulator", lambda: detector)
    arrive = gpu.barrier_arrive

    def committed(barrier):
        # To it, what was read by a thread is overwritten by the copy engine after a fence alone.
        gpu.commit_smem()
        arrive(barrier)

    monkeypatch.setattr(gpu, "barrier_arrive", committed)
    case = ATTENDED["long"]
    query, key, value, pull = given(case)
    mask = mask_of(case)
    zeros = np.zeros(query.shape[:-1], np.float32)
    attended = jit(partial(attend, scale=SCALE, simulated=True))(query, key, value, mask)
    gradients = jit(partial(attend_gradient, scale=SCALE, simulated=True))
    found = gradients(query, key, value, mask, zeros, zeros, pull)
    assert all(np.all(np.isfinite(x)) for x in (*attended, *found))


@jit
def tables(query, key, window):
    return [visit_table(query, key, window, by_query=by_query) for by_query in (True, False)]


@pytest.mark.parametrize("window", [None, 9])
def test_visit_table_covers_visible_blocks(window):
    """Random rows with padding and segments, as in a batch and with blocks in any order."""
    draw, size, cleared = np.random.default_rng(0), 4, 0
    for number in range(8):
        segments = np.sort(draw.integers(1, 3, (2, 32)), axis=1)
        segments[draw.random(segments.shape) < 0.05] = 0
        column = np.broadcast_to(np.arange(32), segments.shape)
        same = (segments[:, :, None] == segments[:, None, :]) & np.tri(32, k=-1, dtype=bool)
        order = np.arange(32)
        if number % 2:
            order = draw.permutation(order.reshape(-1, size)).reshape(-1)
        key = [x.astype(np.int32)[:, order] for x in (column, same.sum(axis=2), segments)]
        first = 4 * draw.integers(0, 5)
        mask = Mask(
            TokenIndices(*(x[:, first : first + 16] for x in key)), TokenIndices(*key), window
        )
        seen = np.asarray(seen_by(mask)).reshape(2, 4, size, 8, size)
        found = tables(block_mask(mask.query, size), block_mask(mask.key, size), window)
        for table, pairs in zip(found, (seen, seen.transpose(0, 3, 4, 1, 2)), strict=True):
            met, whole = pairs.any(axis=(2, 4)), pairs.all(axis=(2, 4))
            first, stop, clear, clear_stop = np.moveaxis(np.asarray(table)[..., None], 2, 0)
            block = np.arange(met.shape[2])
            visited = (block >= first) & (block < stop)
            assert np.all(visited[met])
            taken = (block >= clear) & (block < clear_stop)
            assert np.all(whole[taken]) and np.all(visited[taken])
            cleared += taken.sum()
    assert cleared > 8


def test_causal_rows_are_half_of_the_work():
    column = np.arange(32, dtype=np.int32)[None]
    row = block_mask(TokenIndices(column, column, np.ones_like(column)), 4)
    of_query, of_key = (np.asarray(x)[0] for x in tables(row, row, None))
    number = np.arange(8)
    np.testing.assert_array_equal(of_query[:, 1], number + 1)
    np.testing.assert_array_equal(of_query[1:, 2:], np.stack([0 * number, number], 1)[1:])
    np.testing.assert_array_equal(of_key[:, :2], np.stack([number, 0 * number + 8], 1))
    # A window of a block is two blocks of keys.
    windowed = np.asarray(tables(row, row, 4)[0])[0]
    np.testing.assert_array_equal(windowed[1:, 1] - windowed[1:, 0], 2)


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows_of(batch, time, source, window=None):
    query, key = (
        TokenIndices(*[shaped(batch, size, dtype=jnp.int32)] * 3) for size in (time, source)
    )
    return Mask(query, key, window, causal=True)


def trained(query, key, value, mask):
    attend = partial(core_attention, mask=mask, implementation="mosaic")
    out, back = jax.vjp(attend, query, key, value)
    return out, *back(out)


REAL = [
    (4096, 32, 4, 128, 128, None),
    (4096, 16, 16, 192, 128, None),
    (4000, 8, 4, 256, 256, shaped(dtype=jnp.int32)),
    (1000, 8, 4, 64, 64, 128),
]


@pytest.mark.slow
@pytest.mark.parametrize(("time", "heads", "kv_heads", "width", "wide", "window"), REAL)
def test_they_are_three_kernels_on_cuda(time, heads, kv_heads, width, wide, window):
    """At sizes of networks, which fill a multiprocessor's shared memory."""
    mask = rows_of(1, time, time, window)
    text = jax.export.export(jax.jit(trained), platforms=["cuda"])(
        shaped(1, time, heads, width),
        shaped(1, time, kv_heads, width),
        shaped(1, time, kv_heads, wide),
        mask,
    ).mlir_module()
    assert text.count(KERNEL) == 3
    assert f"{time}x{time}" not in text and "4096x4096" not in text


@pytest.mark.slow
@pytest.mark.parametrize("context", full_but(["ring", "gather"], "ring"))
def test_they_attend_over_cp(context):
    """By lowering, with the types of a mesh checked."""
    mesh = mesh_of("cp2")
    config = ModelConfig(
        vocab_size=11,
        num_heads=2,
        num_kv_heads=1,
        execution=Execution(context=context, attention="mosaic"),
    )

    def local(query, key):
        packed = pack_rows(jnp.zeros((1, 256), int), jnp.ones((1, 256), bool), Model(config, mesh))
        attend = packed.core_attention_of_layer(0)
        out, back = jax.vjp(lambda *x: attend(*x), query, key, key)
        return out, *back(out)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(mesh.cp), out_specs=P(mesh.cp))
    exported = jax.export.export(jax.jit(step), platforms=["cuda"])
    text = exported(shaped(256, 2, 64), shaped(256, 1, 64)).mlir_module()
    # Of a ring each of two hops.
    assert text.count(KERNEL) == (6 if context == "ring" else 3)


def test_attention_kernel_rejects_unsupported_operands(monkeypatch):
    mask = rows_of(1, 8, 8)

    def run(width=64, wide=64, dtype=jnp.bfloat16):
        given = shaped(1, 8, 2, width), shaped(1, 8, 1, width), shaped(1, 8, 1, wide, dtype=dtype)
        jax.jit(trained).lower(*given, mask)

    for changed, message in (
        ({"width": 72}, r"attention=\"mosaic\" is not supported here: heads of 72 elements"),
        (
            {"wide": 320},
            r"heads of 320 elements \(needs a multiple of 64 up to 256\); choose \"blocked\"",
        ),
        (
            {"dtype": jnp.float32},
            r"key and value of bfloat16, bfloat16, float32 \(needs all",
        ),
        ({}, r"of attention runs on NVIDIA GPUs .* lowered for cpu: use \"plain\""),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            run(**changed)
        assert "\n" not in str(refused.value)
    monkeypatch.setattr(choice, "capability", lambda: 10.0)
    with pytest.raises(
        ValueError, match=r"is not supported here: GPUs of capability 10\.0 \(needs 9.0"
    ):
        run(wide=128)
