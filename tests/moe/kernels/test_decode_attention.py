"""Attention over the columns of a cache: the kernel, simulated, against its plain twin."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit
from tiers import full_but

from benchmarks.kernel_cases import COLUMNS
from moe.kernels.decode_attention import decode_attention, split_attention

KERNEL = "custom_call @mosaic_gpu_v2"
ROWS, HEAD_DIM = 3, COLUMNS["windows"].head_dim


def given(name, dtype=jnp.bfloat16):
    """Query, keys and values, NaN in the columns that a row does not see, and these columns."""
    draw, case = np.random.default_rng(0), COLUMNS[name]
    first, stop = case.first, case.stop
    query = draw.normal(size=(ROWS, case.heads, case.head_dim))
    keys = draw.normal(size=(ROWS, case.kv_heads, case.head_dim, case.room))
    values = draw.normal(size=(ROWS, case.kv_heads, case.room, case.v_head_dim))
    for row in range(ROWS):
        unseen = np.r_[: first[row], stop[row] : case.room]
        keys[row, :, :, unseen] = np.nan
        values[row, :, unseen] = np.nan
    ends = (np.asarray(x, np.int32) for x in (first, stop))
    return *(x.astype(dtype) for x in (query, keys, values)), *ends


def looped(query, keys, values, first, stop, scale):
    """In float64, a query at a time."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    out, heads = np.zeros((*query.shape[:2], values.shape[3])), query.shape[1]
    for row in range(ROWS):
        seen = slice(int(first[row]), int(stop[row]))
        for head in range(heads):
            own = head // (heads // keys.shape[1])
            scores = scale * query[row, head] @ keys[row, own, :, seen]
            powers = np.exp(scores - scores.max())
            out[row, head] = powers @ values[row, own, seen] / powers.sum()
    return out


@pytest.mark.parametrize("name", full_but(COLUMNS, "windows", "splits"))
def test_the_kernel_equals_float64(name):
    query, keys, values, first, stop = given(name)
    # The second of three layers; the others hold what must not be read.
    keys, values = (
        np.stack([np.full_like(x, np.nan), x, np.full_like(x, np.nan)]) for x in (keys, values)
    )
    length = COLUMNS[name].length
    kernel = jit(partial(split_attention, scale=0.1, length=length, simulated=True))
    found = kernel(query, keys, values, first, stop, np.int32(1))
    assert found.dtype == jnp.bfloat16
    expected = looped(query, keys[1], values[1], first, stop, 0.1)
    # Powers and results are rounded to eight bits.
    np.testing.assert_allclose(np.float32(found), expected, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("name", full_but(COLUMNS, "rows of several lengths", "windows"))
def test_the_plain_twin_equals_float64(name):
    query, keys, values, first, stop = given(name, np.float32)
    # Zero times what is hidden need be zero there: a cache holds no NaN.
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    for buffers, layer in (((keys, values), None), ((keys[None], values[None]), 0)):
        twin = jit(partial(decode_attention, scale=0.1, layer=layer))
        found = twin(query, *buffers, first, stop)
        expected = looped(query, keys, values, first, stop, 0.1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("room", full_but([192, 4096], 192))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    full_but([(6, 2, HEAD_DIM), (64, 4, HEAD_DIM), (8, 2, 256)], (6, 2, HEAD_DIM)),
)
def test_it_is_one_kernel_on_cuda(room, heads, kv_heads, width):
    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(query, keys, values, first, stop, layer):
        return decode_attention(
            query, keys, values, first, stop, layer=layer, implementation="mosaic"
        )

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(
        shaped(5, heads, width),
        shaped(3, 5, kv_heads, width, room),
        shaped(3, 5, kv_heads, room, width),
        shaped(5, dtype=jnp.int32),
        shaped(5, dtype=jnp.int32),
        shaped(dtype=jnp.int32),
    )
    text = exported.mlir_module()
    assert text.count(KERNEL) == 1
    # No layer is cut out of the buffers.
    assert "dynamic_slice" not in text


def test_decode_kernel_rejects_unsupported_operands():
    query, keys, values, first, stop = given("windows")

    def run(query=query, keys=keys, values=values, name="mosaic"):
        attend = jax.jit(partial(decode_attention, implementation=name))
        return attend(query, keys, values, first, stop)

    wide = np.zeros((*values.shape[:3], 320), jnp.bfloat16)
    for changed, message in (
        (
            {"query": query.astype(np.float32)},
            r"of float32, bfloat16, bfloat16 \(needs all bfloat16",
        ),
        ({"values": wide}, r"heads of 320 elements \(needs a multiple of 64 up to 256"),
        ({"keys": keys[..., :133], "values": values[:, :, :133]}, r"a KV cache of 133 columns"),
        ({"query": np.zeros((3, 260, HEAD_DIM), jnp.bfloat16)}, r"130 query heads per key/value"),
        ({"name": "interpreted"}, r"Pallas's interpreter has no matrix units"),
        ({"name": "cudnn"}, r"'cudnn' of decode_attention is not known"),
        ({}, r"decode_attention runs on NVIDIA GPUs .* lowered for cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changed)
