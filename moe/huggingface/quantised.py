"""Dequantisation of checkpoint tensors (FP8, MXFP4) to float32.

There are two formats: "fp8", e4m3 numbers with a float32 factor for each block of 128 x 128
(DeepSeek-V3, Qwen3-FP8), and "mxfp4", e2m1 numbers with a power of two for each 32 (experts of
gpt-oss). "mxfp4" is exact; "fp8" is one float32 product, of an e4m3 number with four significant
bits.

References:
  DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3. https://arxiv.org/abs/2412.19437
  Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023, version 1.0.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe.huggingface.options import Options

Slices = tuple[slice, ...]
"""Of an array, one for each axis."""
FP8, MXFP4 = "fp8", "mxfp4"
FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of their tensors' names, after the name of the tensor that they encode."""
E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
"""Values encoded by a byte (E4M3), and by half a byte (E2M1)."""
GROUP = 32
"""Numbers that share a power of two in "mxfp4"."""


@dataclass(frozen=True)
class Quantisation:
    """Quantisation format of a checkpoint's tensors, "fp8" or "mxfp4"; the rows and columns of a
    block of "fp8"."""

    method: str
    block: tuple[int, int] = (128, 128)


def read_quantisation(options: Options) -> Quantisation | None:
    """Reads ``quantization_config``; None if there is none.

    Raises:
      ValueError: for a format that is not supported.
    """
    quantization_config = options.take("quantization_config", default=None)
    if quantization_config is None:
        return None
    quantization = Options(
        quantization_config if isinstance(quantization_config, dict) else {}, "quantization_config"
    )
    method = quantization.take("quant_method", default=None)
    if method not in (FP8, MXFP4):
        raise options.unsupported(
            "quantization_config",
            quantization_config,
            f"quant_method {FP8} or {MXFP4}, or no quantization",
        )
    # Not needed: the names of tensors tell which are quantised.
    quantization.pass_over("modules_to_not_convert", "ignored_layers")
    if method == MXFP4:
        quantization.finish()
        return Quantisation(MXFP4)
    quantization.require("fmt", "e4m3", default="e4m3")
    # Rounding of activations by serving engines; here activations are not quantised.
    quantization.pass_over("activation_scheme", "scale_fmt")
    block = quantization.take("weight_block_size", default=None)
    quantization.finish()
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise options.unsupported(
            "quantization_config",
            quantization_config,
            "one scale per block: weight_block_size with two sizes",
        )
    return Quantisation(FP8, (block[0], block[1]))


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as it is, of an open file. Tensors can be read in parts, and say their type as
    safetensors does."""

    file: Any
    path: Path
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def kind(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self, where: Slices) -> np.ndarray:
        return self.file.get_slice(self.name)[where]

    def bytes(self) -> np.ndarray:
        """A tensor of one-byte numbers as its bytes, read from the file on access: the
        reader of safetensors has no such types for NumPy."""
        with self.path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            begin, _ = json.loads(file.read(size))[self.name]["data_offsets"]
        return np.memmap(self.path, np.uint8, "r", 8 + size + begin, self.shape)


@dataclass(frozen=True)
class Fp8Tensor:
    """Of "fp8": ``[row, column]`` bytes, and a factor for each block of so many rows, columns."""

    numbers: PlainTensor
    scales: PlainTensor
    block: tuple[int, int]
    kind: str = "F32"

    @property
    def path(self) -> Path:
        return self.numbers.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def read(self, where: Slices) -> np.ndarray:
        values, block_slices, within = E4M3[self.numbers.bytes()[where]], [], []
        for selected, size, length in zip(where, self.block, self.shape, strict=True):
            start, stop, _ = selected.indices(length)
            first = start // size
            block_slices.append(slice(first, -(-stop // size)))
            within.append(np.arange(start, stop) // size - first)
        scales = self.scales.read(tuple(block_slices)).astype(np.float32)
        return values * scales[np.ix_(*within)]


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Of "mxfp4": ``[expert, out, group, 16]`` bytes of two numbers each, the lower half first, and
    the exponent of each group; as ``[expert, in, out]``."""

    numbers: PlainTensor
    scales: PlainTensor
    kind: str = "F32"

    @property
    def path(self) -> Path:
        return self.numbers.path

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, groups = self.numbers.shape[:3]
        return experts, groups * GROUP, out

    def read(self, where: Slices) -> np.ndarray:
        experts, in_slice, out_slice = where
        start, stop, _ = in_slice.indices(self.shape[1])
        first = start // GROUP
        groups = slice(first, -(-stop // GROUP))
        pairs = self.numbers.read((experts, out_slice, groups, slice(None)))
        values = E2M1[np.stack([pairs & 15, pairs >> 4], axis=-1)]
        exponents = self.scales.read((experts, out_slice, groups)).astype(np.int32) - 127
        values = np.ldexp(values.reshape(*pairs.shape[:3], GROUP), exponents[..., None])
        values = values.reshape(*pairs.shape[:2], -1)
        return values[..., start - first * GROUP : stop - first * GROUP].swapaxes(1, 2)


TensorSource = PlainTensor | Fp8Tensor | Mxfp4Tensor


def tensor_sources(
    plain: Mapping[str, PlainTensor], quantisation: Quantisation | None
) -> dict[str, TensorSource]:
    """All tensors of a checkpoint by name, quantised ones under the name of the tensor they encode.

    Raises:
      ValueError: where the factors of one are of another number than its blocks.
    """
    sources: dict[str, TensorSource] = dict(plain)
    if quantisation is None:
        return sources
    if quantisation.method == FP8:
        for name in [name for name in plain if name + FP8_SCALES in plain]:
            numbers, scales = plain[name], plain[name + FP8_SCALES]
            if numbers.kind != "F8_E4M3" or len(numbers.shape) != 2:
                continue
            counts = zip(numbers.shape, quantisation.block, strict=True)
            _require_shape(scales, tuple(-(-length // size) for length, size in counts))
            sources[name] = Fp8Tensor(numbers, scales, quantisation.block)
            del sources[name + FP8_SCALES]
        return sources
    for blocks in [name for name in plain if name.endswith(MXFP4_BLOCKS)]:
        name = blocks.removesuffix(MXFP4_BLOCKS)
        numbers, scales = plain[blocks], plain.get(name + MXFP4_SCALES)
        if scales is None or numbers.kind != "U8" or numbers.shape[3:] != (GROUP // 2,):
            continue
        _require_shape(scales, numbers.shape[:3])
        sources[name] = Mxfp4Tensor(numbers, scales)
        del sources[blocks], sources[name + MXFP4_SCALES]
    return sources


def _require_shape(scales: PlainTensor, shape: tuple[int, ...]) -> None:
    if scales.shape != shape:
        raise ValueError(
            f"{scales.path}: {scales.name} is {scales.shape}, not {shape}, one scale per "
            "block: use the files and the config.json of the same checkpoint."
        )
