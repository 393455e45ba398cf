"""What a step of latent attention hands to the kernel that reads its cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from programs import jit, mesh_of

from moe.cache import StepCore, StepTokens
from moe.config import Model, ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution
from moe.kernels import latent_decode

LATENT = ModelConfig(
    11,
    num_heads=3,
    num_kv_heads=3,
    head_dim=72,
    mla=MultiHeadLatentAttention(128, None, 64, 8),
    dtype="bfloat16",
)
ROWS, ROOM = 4, 64
POSITIONS, LIVE = np.array([0, 63, 20, 7], np.int32), np.array([True, True, True, False])


def test_step_core_passes_latent_vectors_to_kernel(monkeypatch):
    """Its twin in its place: which layer, which columns, bit for bit; nothing is copied."""
    shapes = []

    def twin(query, vectors, first, stop, layer, *, rank, scale):
        shapes.append((query.shape, vectors.shape, rank))
        return latent_decode._plain(query, vectors, first, stop, layer, rank=rank, scale=scale)

    monkeypatch.setattr(latent_decode, "split_latent_attention", twin)

    def attended(name, buffer, query, narrow, up):
        config = replace(LATENT, execution=Execution(decode_attention=name))
        positions = jnp.asarray(POSITIONS)
        inputs = StepTokens(jnp.zeros_like(positions), positions, jnp.asarray(LIVE))
        step = StepCore(
            Model(config, mesh_of("dp1")), 1, (buffer,), inputs, stack_index=(jnp.int32(1),)
        )
        return step.attend.attend(query, narrow, up), step.buffers[0]

    draw = np.random.default_rng(0)
    sizes = (2, ROWS, 1, 192, ROOM), (ROWS, 3, 72), (ROWS, 192), (128, 3, 16)
    given = [draw.normal(size=size).astype(jnp.bfloat16) for size in sizes]
    both = jit(lambda *given: [attended(name, *given) for name in (None, "mosaic")])
    (expected, cache), (found, written) = jax.device_get(both(*given))
    assert shapes == [((ROWS, 3, 192), (2, ROWS, 1, 192, ROOM), 128)]
    np.testing.assert_array_equal(found[LIVE], expected[LIVE])
    np.testing.assert_array_equal(written, cache)
    # The row's own vector is among those that it sees.
    changed = (written != given[0]).any(axis=(2, 3))
    assert np.argwhere(changed).tolist() == [
        [1, row, column] for row, column in zip(range(3), POSITIONS, strict=False)
    ]
