"""Checkpoints held in few bits are read as the numbers that they stand for."""

import json
import struct
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import mesh_of, random_weights
from public_checkpoints import MESH, change_options, copy_of, loaded, tensors

from moe import huggingface

BLOCK = (8, 6)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def write(folder, held):
    """A safetensors file of (type, array), any type, byte by byte; in place of those in a
    folder."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    header, parts, end = {}, [], 0
    for name, (kind, x) in held.items():
        parts.append(np.ascontiguousarray(x).tobytes())
        offsets = [end, end + len(parts[-1])]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    file = struct.pack("<Q", len(text)) + text + b"".join(parts)
    (folder / "model.safetensors").write_bytes(file)


def in_fp8(x):
    """A matrix in blocks, and what they stand for, number by number."""
    counts = [-(-length // size) for length, size in zip(x.shape, BLOCK, strict=True)]
    draw = np.random.default_rng(x.size)
    scales = draw.uniform(0.5, 2, counts).astype(np.float32)
    whole, stands_for = np.zeros(x.shape, jnp.float8_e4m3fn), np.zeros(x.shape, np.float32)
    for row, column in np.ndindex(x.shape):
        scale = scales[row // BLOCK[0], column // BLOCK[1]]
        whole[row, column] = x[row, column] / scale
        stands_for[row, column] = np.float32(whole[row, column]) * scale
    return whole, scales, stands_for


def fp8_copy(path):
    """DeepSeek-V3 as it comes, and the same with nothing left to multiply."""
    quantised, plain = copy_of("deepseek_v3", path / "fp8"), copy_of("deepseek_v3", path / "plain")
    held, wide = {}, {}
    for name, x in tensors(plain).items():
        if name.endswith("_proj.weight") and x.ndim == 2:
            whole, scales, stands_for = in_fp8(x)
            held[name], held[f"{name}_scale_inv"] = ("F8_E4M3", whole), ("F32", scales)
            wide[name] = ("F32", stands_for)
        else:
            held[name] = wide[name] = ("F32", x)
    # A layer that predicts further tokens is held so too.
    extra = "model.layers.3.mlp.down_proj.weight"
    held[extra] = ("F8_E4M3", np.zeros((9, 7), jnp.float8_e4m3fn))
    held[f"{extra}_scale_inv"] = ("F32", np.ones((2, 2), np.float32))
    write(quantised, held)
    write(plain, wide)
    change_options(quantised, quantization_config=FP8)
    return quantised, plain


@pytest.mark.parametrize("layout", ["dp1", MESH])
def test_blocks_of_eight_bits_are_what_they_stand_for(layout, tmp_path):
    quantised, plain = fp8_copy(tmp_path)
    config, found = huggingface.load(quantised, mesh_of(layout))
    expected_config, expected = huggingface.load(plain, mesh_of("dp1"))
    assert config == expected_config
    chex.assert_trees_all_equal(found, expected)
    assert np.abs(found.layers.attention.query).std() > 0.05


def gpt_oss(folder, groups=2):
    """A network of gpt-oss whose widths groups of 32 divide."""
    config, _ = loaded("gpt_oss")
    config = replace(
        config,
        num_layers=1,
        full_attention_layers=(),
        d_model=32 * groups,
        num_experts=4,
        experts_per_token=2,
        d_expert=32,
    )
    huggingface.save(folder, config, jax.device_put(random_weights(config, 0)))
    return config


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def in_mxfp4(shape):
    """Random ``[expert, out, in]`` bytes and exponents, and what they stand for, ``[expert, in,
    out]``."""
    experts, inward, out = shape
    draw = np.random.default_rng(inward)
    blocks = draw.integers(0, 256, (experts, out, inward // 32, 16)).astype(np.uint8)
    scales = draw.integers(118, 130, blocks.shape[:3]).astype(np.uint8)
    wide = np.zeros(shape, np.float32)
    for expert, row, column in np.ndindex(experts, out, inward):
        group, place = divmod(column, 32)
        byte = int(blocks[expert, row, group, place // 2])
        half = byte >> 4 if place % 2 else byte & 15
        number = E2M1[half & 7] * (-1 if half & 8 else 1)
        wide[expert, column, row] = number * 2.0 ** (int(scales[expert, row, group]) - 127)
    return blocks, scales, wide


@pytest.mark.parametrize("layout", ["dp1", "tp2 / etp2"])
def test_groups_of_four_bits_are_what_they_stand_for(layout, tmp_path):
    gpt_oss(tmp_path / "plain")
    held, wide = {}, {}
    for name, x in tensors(tmp_path / "plain").items():
        held[name] = wide[name] = ("F32", x)
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            blocks, scales, stands_for = in_mxfp4(x.shape)
            del held[name]
            held[f"{name}_blocks"], held[f"{name}_scales"] = ("U8", blocks), ("U8", scales)
            wide[name] = ("F32", stands_for)
    quantised = tmp_path / "mxfp4"
    quantised.mkdir()
    (quantised / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    write(quantised, held)
    write(tmp_path / "plain", wide)
    given = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_options(quantised, quantization_config=given)
    _, found = huggingface.load(quantised, mesh_of(layout))
    _, expected = huggingface.load(tmp_path / "plain", mesh_of("dp1"))
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quantization_config=.*supported: quant_method fp8 or mxfp4",
        ),
        ({**FP8, "weight_block_size": None}, "weight_block_size with two sizes"),
        ({**FP8, "fmt": "e5m2"}, "quantization_config: fmt='e5m2' is not supported"),
        ({**FP8, "zero_point": True}, "quantization_config has options .*zero_point=True"),
    ],
)
def test_other_forms_are_refused_in_one_line(given, message, tmp_path):
    folder = copy_of("qwen3", tmp_path / "other")
    change_options(folder, quantization_config=given)
    with pytest.raises(ValueError, match=message):
        huggingface.config_from(folder)


def test_factors_of_another_number_are_named(tmp_path):
    quantised, _ = fp8_copy(tmp_path)
    change_options(quantised, quantization_config={**FP8, "weight_block_size": [4, 6]})
    with pytest.raises(ValueError, match=r"_scale_inv is \(\d, \d\), not \(\d, \d\), one scale"):
        huggingface.load(quantised, mesh_of("dp1"))
