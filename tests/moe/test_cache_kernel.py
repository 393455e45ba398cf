"""What a kernel cannot read is refused by the configuration, before anything is traced, and what
it writes is counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked
from jax.extend.core import jaxprs_in_params
from programs import mesh_of

from moe.cache import StepCore, StepTokens, kernel_bytes
from moe.config import Model, ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution
from moe.implementations import check_decode_kernel

KERNEL = Execution(decode_attention="mosaic")
HEADS = ModelConfig(8, num_kv_heads=2, head_dim=64, dtype="bfloat16", execution=KERNEL)
# Of DeepSeek-V3's sizes.
LATENT = replace(
    HEADS,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    mla=MultiHeadLatentAttention(512, 1536, 64, 128),
)


@pytest.mark.parametrize("config", [HEADS, LATENT])
def test_decode_kernel_supports_published_heads(config):
    check_decode_kernel(config)
    check_decode_kernel(replace(config, execution=replace(KERNEL, latent="expanded")))
    for name in (None, "plain"):
        check_decode_kernel(
            replace(config, dtype="float32", execution=Execution(decode_attention=name))
        )


def ranks(rank, rope):
    return {"mla": MultiHeadLatentAttention(rank, None, rope, 128)}


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (HEADS, {"dtype": "float32"}, r"keys and values of float32 \(needs bfloat16 or float16"),
        (HEADS, {"head_dim": 80}, r"heads of 80 elements \(needs a multiple of 64 up to 256"),
        (HEADS, {"num_heads": 130}, r"65 query heads per key/value head \(at most 64"),
        (LATENT, {"dtype": "float32"}, r"vectors of float32 \(needs bfloat16 or float16"),
        (LATENT, ranks(512, 32), r"vectors of 544 elements \(needs a multiple of 64 up to 576"),
        (LATENT, ranks(512, 128), r"vectors of 640 elements \(needs a multiple of 64 up to 576"),
        (LATENT, ranks(320, 64), r"kv_lora_rank=320 \(needs a multiple of 128 up"),
    ],
)
def test_decode_kernel_obstacle_is_one_line(config, changed, message):
    config = replace(config, **changed)
    with pytest.raises(
        ValueError, match=rf"^decode_attention='mosaic' is not supported: {message}"
    ):
        check_decode_kernel(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cudnn", "is not known: choose among 'mosaic', 'plain', 'interpreted'; use None"),
        ("interpreted", "is not supported: Pallas's interpreter has no matrix units; use None"),
        ("mosaic", "is not supported: attention sinks in the softmax; use None"),
    ],
)
@unchecked()
def test_names_and_sinks_that_it_does_not_know(name, message):
    execution = Execution(decode_attention=name)
    config = replace(HEADS, attention_sinks=True, execution=execution)
    with pytest.raises(ValueError, match=rf"^decode_attention='{name}' {message}\.$"):
        check_decode_kernel(config)


def bytes_of_kernels(jaxpr):
    """What each kernel of a program writes."""
    asked = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "needs_cuda"}
    for equation in jaxpr.eqns:
        if asked & {v for v in equation.invars if not hasattr(v, "val")}:
            yield sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from bytes_of_kernels(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rows", "columns"),
    [
        # Rows of one part and of three, the last of which is half a part.
        (HEADS, 5, 128),
        (replace(HEADS, num_heads=12, head_dim=128), 3, 320),
        # Narrow vectors: two tiles of heads on a device, in one part; a head of many parts.
        (replace(LATENT, num_heads=144, num_kv_heads=144), 3, 192),
        (replace(LATENT, num_heads=4, num_kv_heads=4), 2, 1024),
        (replace(LATENT, execution=replace(KERNEL, latent="expanded")), 2, 192),
    ],
)
def test_kernel_bytes_counts_kernel_results(config, rows, columns):
    mesh, tp = mesh_of("tp2"), 2

    model = Model(config, mesh)

    def shaped(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    width, v_width = config.head_dim, config.v_head_dim
    buffers = shaped(rows, kv_heads, width, columns), shaped(rows, kv_heads, columns, v_width)
    query, own = shaped(rows, heads, width), shaped(rows, kv_heads, width)
    given = query, own, shaped(rows, kv_heads, v_width)
    if config.mla is not None and config.execution.latent != "expanded":
        rank, rope = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
        buffers = (shaped(rows, 1, rank + rope, columns),)
        up = shaped(rank, heads, width - rope + v_width)
        given = query, shaped(rows, rank + rope), up

    def step(buffers, positions, live, *given):
        core = StepCore(model, 0, buffers, StepTokens(positions, positions, live)).attend
        return (core if len(buffers) == 2 else core.attend)(*given)

    ends = shaped(rows, dtype=jnp.int32), shaped(rows, dtype=jnp.bool_)
    traced = jax.make_jaxpr(step)(buffers, *ends, *given)
    assert list(bytes_of_kernels(traced.jaxpr)) == [kernel_bytes(model, rows, columns)]
    assert kernel_bytes(Model(replace(config, execution=Execution()), mesh), rows, columns) == 0
