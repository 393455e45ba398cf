"""Warning about an update whose collectives are all synchronous although its flags ask for overlap.

XLA's scheduler gives up overlap where a program that overlaps does not fit the device memory, and
says nothing.
"""

from typing import Any

from jrl.checks import flag
from jrl.processes.agreement import is_main_process
from jrl.report.warnings import FewWarnings
from jrl.trainer.compiled import MeshJit
from moe.execution import Execution
from sharding.folding import FoldedMesh
from sharding.overlap import is_synchronous

_WARNINGS = FewWarnings()
_CHECKED: set[tuple[Any, ...]] = set()
"""Static arguments of the programs that were looked at."""


def overlap_flags(execution: Execution) -> list[str]:
    """Flags of the settings that ask for overlap of communication with computation."""
    asked = {
        "expert_chunks": execution.expert_chunks > 1,
        "two_batch_overlap": execution.two_batch_overlap,
        "overlap_grad_reduce": execution.overlap_grad_reduce,
    }
    return [flag(name) for name, is_asked in asked.items() if is_asked]


def can_overlap(execution: Execution, mesh: FoldedMesh) -> bool:
    """True if overlap is asked for on accelerators that communicate; a CPU runs its collectives one
    by one."""
    several = mesh.layout.num_devices > 1 and mesh.platform not in (None, "cpu")
    return several and bool(overlap_flags(execution))


def warn_if_synchronous(program: MeshJit[..., Any], num_static: int, *args: Any) -> None:
    """Prints one line if overlap is asked for and all collectives of an update are synchronous;
    looked up once for each compiled program, which the next call of `program` runs.

    Args:
      num_static: number of static arguments, the objective first.
      args: of `program`.
    """
    objective = args[0]
    execution = objective.config.execution
    if args[:num_static] in _CHECKED or not can_overlap(execution, objective.mesh):
        return
    _CHECKED.add(args[:num_static])
    text = program.lower(*args).compile().as_text()
    if text is None or not is_synchronous(text) or not is_main_process():
        return
    _WARNINGS.warn(
        "synchronous",
        f"{', '.join(overlap_flags(execution))}: the compiler overlaps nothing, all collectives of "
        "the update are synchronous, as where memory is tight. Choose a smaller --micro-batch or "
        "--remat full, or leave out what overlaps.",
    )
