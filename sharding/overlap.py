"""Overlap of communication and computation, read off a scheduled program.

A compiled program (`compiled.as_text()`, HLO with ``is_scheduled=true``) lists its instructions in
the order in which they start. An asynchronous collective is two of them, its start and its done,
and the instructions between may run meanwhile. A synchronous one has nothing beside it.

References:
  OpenXLA, "Operation semantics". https://openxla.org/xla/operation_semantics
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sharding.costs.transfer import Kind

ENTRY = "ENTRY"
"""Name of the computation that a program runs first."""
KINDS: dict[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "all-reduce": "all_reduce",
    "collective-permute": "permute",
}
"""Collectives by their operation in a program."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a program.

    Attributes:
      name: name in its computation.
      result: type of the result, as printed.
      operation: name of the operation, for example "fusion" or "all-gather-start".
      arguments: names of the operands, as printed; of a parameter its index.
      attributes: what follows the operands.
    """

    name: str
    result: str
    operation: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs; of a loop its condition and its body."""
        names = [listed or single for listed, single in _CALLED.findall(self.attributes)]
        return tuple(name.strip().lstrip("%") for text in names for name in text.split(","))

    def computation(self, role: str) -> str:
        """The computation that it runs as "body", "condition" or "to_apply"."""
        match = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.operation} {self.name} has no {role}: it has {self.called}.")
        return match[1]

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None if they are not known when compiling."""
        match = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return None if match is None else int(match[1])

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return bytes_of_type(self.result)


_CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+(?:e\d\w+)?|c64|c128)\[([\d,<= ]*)\]")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


def arrays_of_type(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype, for example "bf16", and shape of each array of a type, as printed."""
    return [
        (dtype, tuple(int(size.strip("<= ")) for size in sizes.split(",") if size.strip()))
        for dtype, sizes in _ARRAY.findall(text)
    ]


def shapes_of_type(text: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bits of an element and shape of each array of a type, as printed."""
    return [
        (_BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0]), shape)
        for dtype, shape in arrays_of_type(text)
    ]


def bytes_of_type(text: str) -> int:
    """Bytes of all arrays of a type, as printed."""
    return sum(bits * math.prod(shape) for bits, shape in shapes_of_type(text)) // 8


def computations(text: str) -> dict[str, list[Instruction]]:
    """Instructions of each computation of a program in their order; the entry computation is named
    `ENTRY`.

    Args:
      text: text of ``compiled.as_text()``.
    """
    program: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for line in text.split("\n"):
        if line.startswith(("%", ENTRY)) and line.endswith("{"):
            name = ENTRY if line.startswith(ENTRY) else re.split(r"[ (]", line)[0].lstrip("%")
            instructions = program.setdefault(name, [])
        elif line.startswith(" ") and " = " in line:
            instructions.append(parse_instruction(line))
    return program


def parse_instruction(line: str) -> Instruction:
    """The instruction of a line of a program."""
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    # The type of a tuple contains spaces.
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    operation, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    return Instruction(name.lstrip("%"), result, operation.strip(), rest[: end - 1], rest[end:])


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"no parenthesis closes the first one of {text[:60]!r}")


@dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: kind of collective.
      bytes: bytes of a device's input.
      devices: devices of a group.
      is_asynchronous: other work may run beside it.
    """

    kind: Kind
    bytes: int
    devices: int
    is_asynchronous: bool


def collective_of(
    instruction: Instruction, by_name: dict[str, Instruction], program: dict[str, list[Instruction]]
) -> Collective | None:
    """The collective that an instruction starts or runs; None if it is another instruction.

    Args:
      by_name: instructions of its computation by name.
      program: result of `computations`.
    """
    operation = instruction.operation
    is_start = operation.endswith("-start")
    inner = instruction
    if operation == "async-start":
        # A collective in a computation of its own, alone or with slices of its operands.
        parts = program.get(instruction.called[0], []) if instruction.called else []
        parts = [part for part in _flattened(parts, program) if part.operation in KINDS]
        if not parts:
            return None
        inner = parts[0]
    kind = KINDS.get(inner.operation.removesuffix("-start"))
    if kind is None:
        return None
    sizes = [by_name[name].bytes for name in instruction.operands if name in by_name]
    if inner.operation.startswith("ragged"):
        # The rows that are sent fit in the input and in the output; the rest is offsets and sizes.
        sizes = [min(sizes[:2])] if len(sizes) > 1 else sizes
    groups = device_groups(inner)
    # A permute joins two; if no group is printed there is one of a single device.
    devices = 2 if kind == "permute" else len(groups[0]) if groups else 1
    is_marked = '"is_sync":true' in instruction.attributes
    return Collective(kind, sum(sizes), devices, is_start and not is_marked)


def _flattened(
    instructions: list[Instruction], program: dict[str, list[Instruction]]
) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        for name in instruction.called:
            yield from _flattened(program.get(name, []), program)


_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_IOTA = r"\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")


def device_groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """Groups of devices of a collective, of a permute the (from, to) pairs.

    They are printed in one of three forms: listed; an iota, reshaped and transposed
    (``[2,4]<=[4,2]T(1,0)``); and axes of a mesh (``mesh['dp'=4,'tp'=2] {'tp'}``), of which a part
    may be taken (``'dp':(2)2``, the second factor of two).
    """
    text = instruction.attributes
    if match := _MESH.search(text):
        return _mesh_groups(match["sizes"], match["ids"], match["axes"])
    if match := re.search(rf"replica_groups=\[(?P<shape>[\d,]+)\]<={_IOTA}", text):
        return _as_groups(_iota(match["dims"], match["order"]).reshape(_numbers(match["shape"])))
    if match := _LISTED.search(text):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    return ()


def _mesh_groups(sizes: str, ids: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups of a mesh along some of its axes.

    Args:
      sizes: sizes of the axes, as printed.
      ids: order of the devices, as printed; None is the order of their numbers.
      axes: axes of a group, as printed, with factors before a part and of it.
    """
    mesh = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    parts = [
        (axis, int(before or 1), int(size or mesh[axis]))
        for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    dims: dict[tuple[str, int], int] = {}
    for axis, size in mesh.items():
        ends = {1, size}.union(*({b, b * n} for each, b, n in parts if each == axis))
        dims |= {(axis, low): high // low for low, high in itertools.pairwise(sorted(ends))}
    within = [(axis, before) for axis, before, _ in parts if (axis, before) in dims]
    names = [*(name for name in dims if name not in within), *within]
    devices = np.arange(math.prod(mesh.values()))
    if ids is not None:
        match = re.match(_IOTA, ids)
        devices = np.array(_numbers(ids)) if match is None else _iota(match["dims"], match["order"])
    ranks = devices.reshape(tuple(dims.values())).transpose([list(dims).index(n) for n in names])
    return _as_groups(ranks.reshape(-1, math.prod(dims[name] for name in within)))


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Numbers from 0 on, reshaped and transposed."""
    numbers = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return numbers if order is None else numbers.transpose(_numbers(order))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _as_groups(ranks: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in ranks.tolist())


def collectives(text: str) -> list[Collective]:
    """Collectives of a scheduled program, each once, between at least two devices.

    Args:
      text: text of ``compiled.as_text()``.
    """
    program = computations(text)
    # What an asynchronous instruction calls is counted by its start.
    wrapped = {
        name
        for instructions in program.values()
        for one in instructions
        if one.operation.startswith("async-")
        for name in one.called
    }
    listed: list[Collective | None] = []
    for name, instructions in program.items():
        if name not in wrapped:
            by_name = {one.name: one for one in instructions}
            listed += [collective_of(one, by_name, program) for one in instructions]
    return [one for one in listed if one is not None and one.devices > 1]


def is_synchronous(text: str) -> bool:
    """True if a program has collectives and none of them is asynchronous: communication then
    overlaps nothing.

    Args:
      text: text of ``compiled.as_text()``.
    """
    listed = collectives(text)
    return bool(listed) and not any(one.is_asynchronous for one in listed)
