"""What a kernel cannot read is refused by the configuration, before anything is traced."""

from dataclasses import replace

import pytest

from moe.cache.kernel import check_kernel
from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.execution import Execution

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
def test_what_it_can_read_is_not(config):
    check_kernel(config)
    check_kernel(replace(config, execution=replace(KERNEL, latent="expanded")))
    for name in (None, "plain"):
        check_kernel(replace(config, dtype="float32", execution=Execution(decode_attention=name)))


def ranks(rank, rope):
    return {"mla": MultiHeadLatentAttention(rank, None, rope, 128)}


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (HEADS, {"dtype": "float32"}, "keys and values of float32, not bfloat16 or float16"),
        (HEADS, {"head_dim": 80}, "heads of 80 elements, a multiple of 64 up to 256"),
        (HEADS, {"num_heads": 130}, "65 queries of a key/value head, up to 64"),
        (LATENT, {"dtype": "float32"}, "vectors of float32, not bfloat16 or float16"),
        (LATENT, ranks(512, 32), "vectors of 544 numbers, a multiple of 64 up to 576"),
        (LATENT, ranks(512, 128), "vectors of 640 numbers, a multiple of 64 up to 576"),
        (LATENT, ranks(320, 64), r"values of 320 numbers \(kv_lora_rank\), a multiple of 128 up"),
    ],
)
def test_what_it_cannot_is_in_a_line(config, changed, message):
    config = replace(config, **changed)
    with pytest.raises(ValueError, match=rf"^decode_attention='mosaic' cannot serve: {message}"):
        check_kernel(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cudnn", "is none of 'mosaic', 'plain', 'interpreted'; use None"),
        ("interpreted", "cannot serve: the plain interpreter has no matrix units; use None"),
        ("mosaic", "has no attention sinks in its softmax; use None"),
    ],
)
def test_names_and_sinks_that_it_does_not_know(name, message):
    execution = Execution(decode_attention=name)
    config = replace(HEADS, attention_sinks=True, execution=execution)
    with pytest.raises(ValueError, match=rf"^decode_attention='{name}' {message}\.$"):
        check_kernel(config)
