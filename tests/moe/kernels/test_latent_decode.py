"""Attention over a cache of narrow vectors: the kernel, simulated, against its plain twin."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from simulator import simulates_transposes
from tiers import full_but

from benchmarks.kernel_cases import NARROW
from moe.cache import Cache, StepTokens
from moe.config import Model, ModelConfig, MultiHeadLatentAttention
from moe.decoding import decode_step
from moe.execution import Execution
from moe.kernels import latent_decode
from moe.kernels.latent_decode import (
    MAX_PRODUCT,
    MIN_PROGRAMS,
    latent_decode_attention,
    split_latent_attention,
    split_length,
    value_slices,
)
from moe.layers.depth import split_layer_groups
from moe.placement import specs
from sharding.collectives import vary

KERNEL = "custom_call @mosaic_gpu_v2"


def given(name, dtype=jnp.bfloat16):
    """Queries, vectors, NaN in the columns that a row does not see, and these columns."""
    draw, case = np.random.default_rng(0), NARROW[name]
    rows = len(case.first)
    query = draw.normal(size=(rows, case.heads, case.width))
    vectors = draw.normal(size=(rows, 1, case.width, case.room))
    for row in range(rows):
        vectors[row, ..., : case.first[row]] = np.nan
        vectors[row, ..., case.stop[row] :] = np.nan
    ends = (np.asarray(x, np.int32) for x in (case.first, case.stop))
    return query.astype(dtype), vectors.astype(dtype), *ends


def looped(query, vectors, first, stop, scale, rank):
    """In float64, a row at a time."""
    query, vectors = (np.asarray(x, np.float64) for x in (query, vectors))
    out = np.zeros((*query.shape[:2], rank))
    for row, (begin, end) in enumerate(zip(first, stop, strict=True)):
        seen = vectors[row, 0, :, begin:end]
        scores = scale * query[row] @ seen
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = powers @ seen[:rank].T / powers.sum(axis=1, keepdims=True)
    return out


@simulates_transposes
@pytest.mark.parametrize("name", full_but(NARROW, "rows of several lengths", "windows"))
def test_the_kernel_equals_float64(name):
    query, vectors, first, stop = given(name)
    rank, length = NARROW[name].rank, NARROW[name].length
    # The second of three layers; the others hold what must not be read.
    hidden = np.full_like(vectors, np.nan)
    stacked = np.stack([hidden, vectors, hidden])
    kernel = partial(split_latent_attention, rank=rank, scale=0.1, length=length, simulated=True)
    found = jit(kernel)(query, stacked, first, stop, np.int32(1))
    assert found.dtype == jnp.bfloat16
    expected = looped(query, vectors, first, stop, 0.1, rank)
    # Powers and results are rounded to eight bits.
    np.testing.assert_allclose(np.float32(found), expected, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("name", ["rows of several lengths", "windows"])
def test_the_plain_twin_equals_float64(name):
    query, vectors, first, stop = given(name, np.float32)
    # Zero times what is hidden need be zero there: a cache holds no NaN.
    vectors, rank = np.nan_to_num(vectors), NARROW[name].rank
    for buffer, layer in ((vectors, None), (vectors[None], 0)):
        twin = jit(partial(latent_decode_attention, scale=0.1, rank=rank, layer=layer))
        found = twin(query, buffer, first, stop)
        expected = looped(query, vectors, first, stop, 0.1, rank)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("heads", full_but([16, 128], 128))
def test_it_is_one_kernel_on_cuda(heads):
    """At DeepSeek-V3's sizes, which fill a multiprocessor's shared memory."""

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(query, vectors, first, stop, layer):
        return latent_decode_attention(
            query, vectors, first, stop, 0.1, rank=512, layer=layer, implementation="mosaic"
        )

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(
        shaped(5, heads, 576),
        shaped(3, 5, 1, 576, 4096),
        shaped(5, dtype=jnp.int32),
        shaped(5, dtype=jnp.int32),
        shaped(dtype=jnp.int32),
    )
    text = exported.mlir_module()
    assert text.count(KERNEL) == 1
    # No layer is cut out of the buffer.
    assert "dynamic_slice" not in text


NETWORK = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=72,
    num_experts=0,
    d_ff=12,
    mla=MultiHeadLatentAttention(128, None, 64, 8),
    dtype="bfloat16",
    execution=Execution(scan_layers=True),
)
POSITIONS, ROOM, STEPS = np.array([0, 126, 63], np.int32), 128, 2


def network_by(name):
    """Logits ``[step, row, vocab]`` of two steps of a network, and what it is given: weights,
    narrow vectors of the tokens before, and tokens."""
    config = replace(NETWORK, execution=replace(NETWORK.execution, decode_attention=name))
    mesh = mesh_of("dp1")

    model = Model(config, mesh)

    def local(weights, vectors, tokens):
        weights, vectors, tokens = vary((weights, vectors, tokens), mesh.axes)

        def step(cache, number):
            place = vary(jnp.asarray(POSITIONS), mesh.axes) + number
            inputs = StepTokens(tokens[number], place, jnp.ones_like(place, bool))
            layers = split_layer_groups(weights, config)
            logits, cache, _ = decode_step(layers, weights, cache, inputs, model)
            return cache, logits

        return jax.lax.scan(step, Cache((vectors,), ()), jnp.arange(STEPS))[1][None]

    program = on_mesh(local, mesh, (specs(model), P(), P()), P(mesh.axes))
    draw = np.random.default_rng(1)
    vectors = draw.normal(size=(2, len(POSITIONS), 1, 192, ROOM)).astype(jnp.bfloat16)
    tokens = draw.integers(0, config.vocab_size, (STEPS, len(POSITIONS)), np.int32)
    return program, (random_weights(config, 0), vectors, tokens)


@pytest.mark.slow
@simulates_transposes
def test_a_network_decodes_by_the_kernel(monkeypatch):
    simulated = partial(split_latent_attention, length=64, simulated=True)
    monkeypatch.setattr(latent_decode, "split_latent_attention", simulated)
    found, expected = (
        np.asarray(program(*given), np.float32)
        for program, given in map(network_by, ("mosaic", None))
    )
    assert np.std(expected) > 0.1
    # Powers are rounded to eight bits, here before and there after they are divided by their sum.
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.slow
def test_a_network_by_the_kernel_is_lowered_for_cuda():
    program, given = network_by("mosaic")
    text = jax.export.export(program, platforms=["cuda"])(*given).mlir_module()
    # In one loop over layers, in one over steps.
    assert text.count("call @mosaic_gpu_v2") == 1


def test_parts_keep_a_gpu_busy_and_are_no_shorter_than_worth_it():
    # Few rows in many parts, but of 256 columns or more; many rows in one or two.
    assert split_length(2, 4096) == 256
    assert split_length(1, 192) == 192
    assert split_length(64, 8192) == 960 and MIN_PROGRAMS <= 64 * -(-8192 // 960)
    assert split_length(256, 4160) == 1408 and split_length(1024, 4160) == 4160


@pytest.mark.parametrize("rank", [128, 256, 384, 512])
def test_two_warpgroups_sum_all_values(rank):
    first, second = value_slices(rank)
    elements = [at for start, size in (*first, *second) for at in range(start, start + size)]
    assert elements == list(range(rank))
    assert all(size % 64 == 0 and 0 < size <= MAX_PRODUCT for _, size in (*first, *second))
    # The first has the scores beside them.
    assert len(first) == 1 and first[0][1] <= rank // 2


def test_latent_kernel_rejects_unsupported_operands():
    query, vectors, first, stop = given("windows")

    def run(query=query, vectors=vectors, rank=128, name="mosaic"):
        attend = partial(latent_decode_attention, scale=0.1, rank=rank, implementation=name)
        return jax.jit(attend)(query, vectors, first, stop)

    wide = {"query": np.zeros((2, 5, 640), jnp.bfloat16)}
    wide["vectors"] = np.zeros((2, 1, 640, 192), jnp.bfloat16)
    for changed, message in (
        ({"query": query.astype(np.float32)}, r"query and vectors of float32, bfloat16 \(needs"),
        (wide, r"vectors of 640 elements \(needs a multiple of 64 up to 576\); use None"),
        ({"rank": 64}, r"kv_lora_rank=64 \(needs a multiple of 128 up to 512\); use"),
        (
            {"vectors": vectors[..., :133]},
            r"a KV cache of 133 columns \(needs a multiple of 64\); use",
        ),
        ({"name": "interpreted"}, r"Pallas's interpreter has no matrix units"),
        ({"name": "cudnn"}, r"'cudnn' of latent_decode_attention is not known"),
        ({}, r"latent_decode_attention runs on NVIDIA GPUs .* lowered for cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changed)
