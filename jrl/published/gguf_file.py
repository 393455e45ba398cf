"""Header of a GGUF file: its metadata, and where its tensors are.

Versions 2 and 3 of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian. The
package `gguf` reads them too, but takes minutes for a vocabulary of a quarter of a million tokens.
"""

import mmap
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Format characters of `struct` by the number of a type."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored.

    Attributes:
      shape: with the dimension that changes fastest last.
      kind: number of its type, see `gguf.GGMLQuantizationType`.
      offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata by name, tensors by name, and the file's bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    content: mmap.mmap

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Reads the header of a file.

        Raises:
          ValueError: if it cannot be read, is not a GGUF file, or is truncated.
        """
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror}).") from error
        except ValueError as error:  # an empty file
            raise ValueError("is empty, and no GGUF file.") from error
        cursor = _Cursor(content)
        try:
            if content[:4] != MAGIC:
                raise ValueError(f"begins with {content[:4]!r}, not with {MAGIC!r}: no GGUF file.")
            cursor.position = 4
            version = cursor.scalar("I")
            if version not in VERSIONS:
                raise ValueError(f"is GGUF of version {version}; supported: 2, 3, little-endian.")
            num_tensors, num_metadata = cursor.scalar("Q"), cursor.scalar("Q")
            entries = [cursor.entry() for _ in range(num_metadata)]
            tensors = [cursor.tensor() for _ in range(num_tensors)]
        except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError("ends early, or its header is damaged: download it again.") from error
        metadata = _by_name(entries, "the entry")
        alignment = metadata.get("general.alignment", 32)
        begin = -(-cursor.position // alignment) * alignment
        placed = [(each.name, replace(each, offset=begin + each.offset)) for each in tensors]
        return cls(metadata, _by_name(placed, "the tensor"), content)

    def values(self, name: str) -> np.ndarray:
        """Values of a tensor: float16 and bfloat16 unchanged, all others as float32.

        Raises:
          ValueError: if its quantisation is not supported, or the file is truncated.
        """
        import gguf
        import ml_dtypes

        tensor = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            what = f"{name} has the type {tensor.kind}, which is not supported."
            raise ValueError(what) from error
        size = int(np.prod(tensor.shape)) // block * num_bytes
        if tensor.offset + size > len(self.content):
            raise ValueError(f"ends within the tensor {name}: download it again.")
        data = np.frombuffer(self.content, np.uint8, size, tensor.offset)
        if kind.name in ("F16", "BF16", "F32"):
            dtypes = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
            return data.view(dtypes[kind.name]).reshape(tensor.shape)
        rows = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * num_bytes)
        try:
            return gguf.dequantize(rows, kind)
        except NotImplementedError as error:
            what = f"{name} is quantised as {kind.name}, which is not supported."
            raise ValueError(what) from error


def _by_name(named: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    for name, number in Counter(name for name, _ in named).items():
        if number > 1:
            raise ValueError(f"has {what} {name} {number} times: convert the model again.")
    return dict(named)


class _Cursor:
    """Reads values one after another."""

    def __init__(self, content: mmap.mmap):
        self._content, self.position = content, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        begin, self.position = self.position, self.position + length
        if self.position > len(self._content):
            raise IndexError(self.position)
        return self._content[begin : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in (STRING, ARRAY):
            return [self.value(kind) for _ in range(length)]
        code = f"<{length}{SCALARS[kind]}"
        values = struct.unpack_from(code, self._content, self.position)
        self.position += struct.calcsize(code)
        return list(values)

    def entry(self) -> tuple[str, Any]:
        name = self.text()
        return name, self.value(self.scalar("I"))

    def tensor(self) -> StoredTensor:
        """A tensor with its offset from the first one."""
        name, num_dims = self.text(), self.scalar("I")
        dims = [self.scalar("Q") for _ in range(num_dims)]
        return StoredTensor(name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q"))
