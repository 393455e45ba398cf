"""Bytes that the instructions of a scheduled program read from memory and write to it.

An operand is read whole and a result written whole, with three exceptions: of an operand of which
only a slice is used, the slice is read, for example one layer's weights of a stack; a
`dynamic-update-slice` or `scatter` of an operand that nothing else uses works in place, and moves
what it updates; and a fusion keeps what is between its instructions in registers.
"""

import math
from collections.abc import Iterable

from sharding.overlap import Instruction, shapes_of_type

SLICES = {"slice", "dynamic-slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that work in place, by the operand that has the new elements."""
VIEWS = {"bitcast", "reshape", "convert", "copy", "transpose"}
"""Operations of one operand; a fusion computes only the elements that a slice of them needs."""

Program = dict[str, list[Instruction]]


def traffic(instruction: Instruction, operands: Iterable[Instruction], program: Program) -> float:
    """Bytes that an instruction reads and writes; it is neither a collective nor control flow.

    Args:
      operands: instructions of its computation that it uses.
      program: computations by their names.
    """
    operands = list(operands)
    operation, inputs = instruction.operation, sum(one.bytes for one in operands)
    result = float(instruction.bytes)
    if operation.endswith("-start"):
        operation = operation.removesuffix("-start")
        result -= inputs  # of a start, the type has its operands too
    called = program.get(instruction.called[0], []) if instruction.called else []
    if operation == "fusion" and called:
        return _read(operands, called) + sum(_written(one, called) for one in _results(called))
    if operation == "async" and called:
        own = {one.name: one for one in called}
        return sum(
            traffic(one, [own[name] for name in one.operands], program)
            for one in called
            if one.operation not in ("parameter", "tuple", "bitcast")
        )
    if operation in SLICES:
        return 2.0 * result
    if operation in UPDATES:
        new = float(operands[UPDATES[operation]].bytes)
        # A scatter reads its indices, and combines the new elements with those that are there.
        return 2.0 * new + (new + operands[1].bytes if operation == "scatter" else 0.0)
    return result + inputs


def _results(fusion: list[Instruction]) -> list[Instruction]:
    """Results of a fusion: its last instruction, or the operands of a tuple."""
    root, own = fusion[-1], {one.name: one for one in fusion}
    return [own[name] for name in root.operands] if root.operation == "tuple" else [root]


def _written(result: Instruction, fusion: list[Instruction]) -> float:
    """Bytes that a fusion writes for one of its results; a scatter reads them first."""
    own = {one.name: one for one in fusion}
    while result.operation == "bitcast":
        result = own[result.operands[0]]
    if result.operation not in UPDATES or _source(own[result.operands[0]], own) is None:
        return float(result.bytes)
    new = own[result.operands[UPDATES[result.operation]]].bytes
    return new * (2.0 if result.operation == "scatter" else 1.0)


def _source(value: Instruction, own: dict[str, Instruction]) -> Instruction | None:
    """The parameter that a value is a bitcast of; None for what a fusion computes."""
    while value.operation == "bitcast":
        value = own[value.operands[0]]
    return value if value.operation == "parameter" else None


def _read(operands: list[Instruction], fusion: list[Instruction]) -> float:
    """Bytes that a fusion reads of its operands."""
    parameters = {int(one.arguments): one for one in fusion if one.operation == "parameter"}
    return sum(
        _elements_read(parameters[index], fusion) * operand.bytes / max(_elements(operand), 1)
        if index in parameters and _elements(operand)
        else operand.bytes
        for index, operand in enumerate(operands)
    )


def _elements_read(parameter: Instruction, fusion: list[Instruction]) -> int:
    """Elements of a parameter that a fusion reads: all, if anything but slices uses it."""
    names, count = {parameter.name}, 0
    for one in fusion:
        used = [name for name in one.operands if name in names]
        if not used or one.operation == "parameter":
            continue
        in_place = used == [one.operands[0]]  # not an index or a new element
        if one.operation in VIEWS and one is not fusion[-1]:
            names.add(one.name)
        elif one.operation in SLICES and in_place:
            count += _elements(one)
        elif not (one.operation in UPDATES and in_place):
            return _elements(parameter)
    return min(count, _elements(parameter))


def _elements(instruction: Instruction) -> int:
    """Elements of the arrays of a result."""
    return sum(math.prod(shape) for _, shape in shapes_of_type(instruction.result))
