"""Reading what Mosaic GPU and NVIDIA's assembler leave of each kernel: registers, spills, shared
memory and the instructions of the machine code."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.absent.descriptions import (
    REGISTERS,
    RESERVED,
    SHARED_MEMORY,
    SHARED_MEMORY_OF_BLOCK,
    THREADS,
)

WARPGROUP = 128
"""Threads of a warpgroup."""
SERIALISED = ("C7510", "C7512")
"""Advisories of the assembler: each product waits for the one before it, for lack of registers or
for another reason."""
IGNORES_SETMAXNREG = "C7504"
"""Advisory of the assembler: `setmaxnreg` is ignored in relocatable code, as nvJitLink links it."""


class Assembly(NamedTuple):
    """The assembler's report of a kernel.

    Attributes:
      registers: of a thread.
      spilled: bytes of a thread that are stored in local memory, as registers do not suffice.
      serialised: the matrix instructions wait for one another.
    """

    registers: int
    spilled: int
    serialised: bool


class Kernel(NamedTuple):
    """A kernel for a GPU, compiled to machine code.

    Attributes:
      name: in profiles.
      programs: thread blocks of a launch.
      warpgroups: of a program.
      linked: of the code that JAX runs: linked by nvJitLink where that library is installed, as
        ``pip install "jax[cuda13]"`` does, and `setmaxnreg` is then ignored.
      alone: of the same PTX by ``ptxas`` alone, as JAX compiles it without nvJitLink.
      shared: bytes of shared memory of a program.
      instructions: how often each occurs in the machine code, by its name without modifiers.
      wide_loads: loads of device memory of 16 bytes a thread; `instructions` counts all as "LDG".
    """

    name: str
    programs: int
    warpgroups: int
    linked: Assembly
    alone: Assembly
    shared: int
    instructions: dict[str, int]
    wide_loads: int

    @property
    def resident(self) -> int:
        """Programs that fit on a multiprocessor at a time."""
        threads = self.warpgroups * WARPGROUP
        # Registers are given out eight at a time.
        registers = -(-self.linked.registers // 8) * 8 * threads
        by_memory = SHARED_MEMORY // (self.shared + RESERVED)
        return min(REGISTERS // max(1, registers), by_memory, THREADS // threads)

    def defects(self) -> list[str]:
        """Spills, serialised products, or too much shared memory; empty without any."""
        found = []
        for assembly, how in ((self.linked, ""), (self.alone, " by ptxas alone")):
            if assembly.spilled:
                found.append(f"spills {assembly.spilled} bytes{how}")
            if assembly.serialised:
                found.append(f"products serialised{how}")
        if self.shared > SHARED_MEMORY_OF_BLOCK:
            found.append(f"{self.shared} bytes of shared memory (at most {SHARED_MEMORY_OF_BLOCK})")
        return found


def read_dumps(folder: Path) -> list[Kernel]:
    """The kernels whose dumps are in a folder, in the order of their names.

    Raises:
      RuntimeError: when a dump is not as expected, so that no figure is made up.
    """
    return [
        _read_kernel(path, folder, path.name.removesuffix(".ptxas"))
        for path in sorted(folder.glob("*.ptxas"))
    ]


def _read_kernel(report: Path, folder: Path, stem: str) -> Kernel:
    host = "".join(path.read_text() for path in folder.glob(f"{stem}.ll"))
    code = "".join(path.read_text(errors="replace") for path in folder.glob(f"{stem}.sass*"))
    spec = re.search(r"call void @mosaic_gpu_build_kernel_spec\(ptr [^,]+, ([^)]*)\)", host)
    if spec is None or not code:
        raise RuntimeError(f"the dump of {stem} has no launch or no machine code: another jaxlib?")
    # Three numbers each of the grid, the cluster and the block; then the shared memory.
    numbers = [int(number) for number in re.findall(r"i32 (\d+)", spec[1])]
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code)
    return Kernel(
        re.sub(r"_\d+$", "", stem),
        numbers[0] * numbers[1] * numbers[2],
        numbers[6] * numbers[7] * numbers[8] // WARPGROUP,
        read_report(report.read_text(errors="replace")),
        assemble(folder / f"{stem}.ptx"),
        numbers[9],
        dict(Counter(instruction.partition(".")[0] for instruction in instructions)),
        sum(i.startswith("LDG.") and "128" in i.split(".") for i in instructions),
    )


def read_report(text: str) -> Assembly:
    """Registers and spills of the kernel of a report of ``ptxas -v``.

    Raises:
      RuntimeError: when it has no number of registers or of spilled bytes.
    """
    registers = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    if registers is None or spilled is None:
        raise RuntimeError(f"no registers in the assembler's report: {text[-300:]}")
    serialised = any(code in text for code in SERIALISED)
    return Assembly(int(registers[1]), int(spilled[1]), serialised)


def assemble(ptx: Path) -> Assembly:
    """Registers and spills of a PTX file that ``ptxas`` alone compiles."""
    architecture = re.search(r"(?m)^\s*\.target\s+(\w+)", ptx.read_text())
    if architecture is None:
        raise RuntimeError(f"{ptx.name} names no target")
    command = ["ptxas", f"-arch={architecture[1]}", "-v", "-O3", "-o", os.devnull, str(ptx)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refused {ptx.name}: {(done.stdout + done.stderr)[-300:]}")
    return read_report(done.stdout + done.stderr)
