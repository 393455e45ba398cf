"""Rows of the report: a kernel or a program at a shape on a device, compiled or refused."""

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.absent import compilers
from benchmarks.absent.descriptions import TPUS
from benchmarks.absent.machine_code import Kernel
from benchmarks.absent.selection import Selection
from benchmarks.absent.shapes import FIRST, MODELS, QUICK

Figures = dict[str, Any]
HOPPER = "h100"
"""The GPU that kernels are compiled for; an H200 gets the same machine code."""
COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG", "BAR", "SYNCS", "LDL", "STL")
"""Instructions of the report: products of the matrix units, copies by the copy engine (in and out),
asynchronous copies of threads, loads and stores of device memory, barriers, local memory."""

_COMPILED: dict[tuple[str, str, str], list[Kernel]] = {}


def gpu_kernels(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each Mosaic kernel and shape; quick: those of `shapes.FIRST` and `shapes.QUICK`."""
    from benchmarks.absent.kernel_cases import gpu_cases

    for model in MODELS:
        for case in gpu_cases(model):
            if quick and model != FIRST and case.operation not in QUICK.get(model, ()):
                continue
            yield from _rows_of_case(HOPPER, model, case, selection, keep)


def _rows_of_case(
    kind: str, model: str, case: Any, selection: Selection, keep: Path | None
) -> Iterator[Figures]:
    # They import JAX.
    from benchmarks.absent.bounds import bound, defects_of
    from sharding.costs.hardware import HARDWARE

    about = {"device": kind, "model": model, "operation": case.operation}
    label = f"{kind} {model} {case.operation}"
    if not selection.takes(label):
        return
    folder = folder_of(keep, label)
    try:
        operands = on_one_device(kind, case.operands)
        program = compilers.compile_for(kind, case.function, *operands, keep=folder)
    except Exception as error:  # a compiler's refusal has no type of its own; it is a row
        yield about | {"error": reason(error)}
        return
    # JAX compiles equal kernels of a process once: models with the same shape share one.
    same = kind, case.operation, str(case.operands)
    kernels = program.kernels or _COMPILED.get(same, [])
    _COMPILED[same] = kernels
    figures = about | {"seconds": program.seconds, "temporaries": program.temporaries}
    if kind in TPUS:
        yield figures
    elif not kernels:
        yield about | {"error": "compiled, but no machine code of a kernel was left"}
    for kernel in kernels:
        bounds = bound(kernel.name, MODELS[model], case, HARDWARE[kind])
        yield figures | {
            "kernel": kernel.name,
            "floor": bounds.floor,
            "issued": bounds.issued,
            "programs": kernel.programs,
            "warpgroups": kernel.warpgroups,
            "registers": kernel.linked.registers,
            "spilled": kernel.linked.spilled,
            "alone_registers": kernel.alone.registers,
            "alone_spilled": kernel.alone.spilled,
            "shared": kernel.shared,
            "resident": kernel.resident,
            "wide_loads": kernel.wide_loads,
            "instructions": {name: kernel.instructions.get(name, 0) for name in COUNTED},
            "defects": [*kernel.defects(), *defects_of(kernel, bounds)],
        }


def folder_of(keep: Path | None, label: str) -> Path | None:
    """Folder of a row in that of all rows, which is made; None without one."""
    if keep is None:
        return None
    folder = keep / label.replace("/", "-").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


NAMES = ("device", "model", "operation", "layout", "program", "flags", "form")
"""Fields that say what a row is of."""


def merged(before: Sequence[Figures], found: Sequence[Figures]) -> list[Figures]:
    """Rows of an earlier run and of this one, which replaces those of the same name where they are;
    others are the last."""
    together = by_name(before) | by_name(found)
    return [row for rows in together.values() for row in rows]


def by_name(rows: Sequence[Figures]) -> dict[tuple[Any, ...], list[Figures]]:
    """Rows by what they are of; an operation of more than one kernel has a row for each."""
    found: dict[tuple[Any, ...], list[Figures]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(field) for field in NAMES), []).append(row)
    return found


def on_one_device(kind: str, operands: Any) -> Any:
    """The operands on one absent device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    shape = "1x1x1" if kind not in TPUS else None
    mesh = Mesh(np.array(compilers.devices(kind, shape)[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands
    )


def reason(error: Exception) -> str:
    """The error in a line, from where it says what is wrong."""
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    return " ".join(" ".join(lines).split())[:400]
