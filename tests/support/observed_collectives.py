"""Collectives of a program, extracted from it: kind, axes or groups, dtype, bytes, count.

`jaxpr_collectives` reads a traced program, for which no device need exist and nothing is compiled;
`hlo_collectives` the text of a compiled one, in which the compiler may have joined collectives or
left some out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import jaxprs_in_params

from sharding.costs.transfer import Kind
from sharding.overlap import KINDS, arrays_of_type, computations, device_groups

PRIMITIVES: dict[str, Kind] = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "ppermute": "permute",
}


@dataclass(frozen=True)
class Observed:
    """A collective of a program.

    Attributes:
      kind: of collective.
      over: its mesh axes, or in a compiled program its groups of devices.
      dtype: of each device's input.
      shape: of each device's input.
      times: number of executions, with loops of known length and all branches counted.
      in_branch: true if it is in a branch, which may not be taken.
      groups: groups of indices along the axes, in a traced program; None is one of all.
    """

    kind: Kind
    over: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    times: int = 1
    in_branch: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a device's input, over all executions."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize * self.times


def jaxpr_collectives(
    jaxpr: core.Jaxpr, times: int = 1, in_branch: bool = False
) -> Iterator[Observed]:
    """Every collective of a traced program, an entry for each input array.

    Raises:
      ValueError: for a collective in a loop whose length is not known before it runs.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in PRIMITIVES:
            named = equation.params.get("axes") or equation.params["axis_name"]
            axes = (named,) if isinstance(named, str) else tuple(named)
            operands, kind, hops = equation.invars, PRIMITIVES[name], times
            groups = equation.params.get("axis_index_groups")
            if groups and kind == "all_gather" and not equation.params["tiled"]:
                # Of the arrays of the other members one is used, so it counts as so many permutes.
                kind, hops, groups = "permute", times * (len(groups[0]) - 1), None
            if name == "ragged_all_to_all":
                # The sent data fits in both buffers, the input and the output.
                operands = [min(operands[:2], key=lambda buffer: buffer.aval.size)]  # pyright: ignore
            for operand in operands:
                aval: Any = operand.aval
                yield Observed(kind, axes, aval.dtype.name, aval.shape, hops, in_branch, groups)
        inner_times = times * equation.params["length"] if name == "scan" else times
        for inner in jaxprs_in_params(equation.params):
            collectives = jaxpr_collectives(inner, inner_times, in_branch or name == "cond")
            if name != "while":
                yield from collectives
            elif next(collectives, None) is not None:
                raise ValueError(
                    "a collective in a while loop cannot be counted: its number of "
                    "iterations is unknown."
                )


_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def hlo_collectives(text: str) -> Iterator[Observed]:
    """Every collective of a compiled program (``compiled.as_text()``), each once, also in loops, an
    entry for each input array.

    `Observed.over` are its groups; of a permute the (from, to) pairs.
    """
    for instructions in computations(text).values():
        by_name = {one.name: one for one in instructions}
        for one in instructions:
            kind = KINDS.get(one.operation.removesuffix("-start"))
            for name in one.operands if kind is not None else ():
                for dtype, shape in arrays_of_type(by_name[name].result):
                    yield Observed(kind, device_groups(one), _DTYPES[dtype], shape)
