"""Overlap of communication and computation, read off a scheduled program.

A compiled program (`compiled.as_text()`, HLO with ``is_scheduled=true``) lists its instructions in
the order in which they start. An asynchronous collective is two of them, its start and its done,
and the instructions between may run meanwhile. A synchronous one has nothing beside it.

References:
  OpenXLA, "Operation semantics". https://openxla.org/xla/operation_semantics
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
      name: in its computation.
      result: type of the result, as printed.
      operation: such as "fusion" or "all-gather-start".
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


def shapes_of_type(text: str) -> list[tuple[int, tuple[int, ...]]]:
    """Bits of an element and shape of each array of a type, as printed."""
    arrays = []
    for dtype, sizes in _ARRAY.findall(text):
        bits = _BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])
        shape = tuple(int(size.strip("<= ")) for size in sizes.split(",") if size.strip())
        arrays.append((bits, shape))
    return arrays


def bytes_of_type(text: str) -> int:
    """Bytes of all arrays of a type, as printed."""
    return sum(bits * math.prod(shape) for bits, shape in shapes_of_type(text)) // 8


def computations(text: str) -> dict[str, list[Instruction]]:
    """Instructions of each computation of a program in their order; that of the entry is `ENTRY`.

    Args:
      text: of ``compiled.as_text()``.
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
      kind: of collective.
      bytes: of a device's input.
      devices: of a group.
      is_asynchronous: other work may run beside it.
    """

    kind: Kind
    bytes: int
    devices: int
    is_asynchronous: bool


def collective_of(
    instruction: Instruction,
    by_name: dict[str, Instruction],
    program: dict[str, list[Instruction]],
) -> Collective | None:
    """The collective that an instruction starts or runs; None if it is another instruction.

    Args:
      by_name: instructions of its computation by name.
      program: of `computations`.
    """
    operation = instruction.operation
    is_start = operation.endswith("-start")
    inner, operands = (
        instruction,
        [by_name[name] for name in instruction.operands if name in by_name],
    )
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
    sizes = [operand.bytes for operand in operands]
    if inner.operation.startswith("ragged"):
        # The rows that are sent fit in the input and in the output; the rest is offsets and sizes.
        sizes = [min(sizes[:2])] if len(sizes) > 1 else sizes
    is_marked = '"is_sync":true' in instruction.attributes
    return Collective(kind, sum(sizes), _group_size(inner), is_start and not is_marked)


def _flattened(
    instructions: list[Instruction], program: dict[str, list[Instruction]]
) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        for name in instruction.called:
            yield from _flattened(program.get(name, []), program)


def _group_size(instruction: Instruction) -> int:
    """Devices of a group, of three printed forms of replica groups; 2 for a permute."""
    text = instruction.attributes
    if instruction.operation.startswith("collective-permute"):
        return 2
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'([^']+)'", match[2]))
    if match := re.search(r"replica_groups=\[([\d,]+)\]", text):
        return int(match[1].split(",")[-1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return match[1].count(",") + 1
    return 1


def collectives(text: str) -> list[Collective]:
    """Collectives of a scheduled program, each once, between at least two devices.

    Args:
      text: of ``compiled.as_text()``.
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
      text: of ``compiled.as_text()``.
    """
    listed = collectives(text)
    return bool(listed) and not any(one.is_asynchronous for one in listed)
