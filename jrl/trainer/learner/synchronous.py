"""Warning about an update whose collectives are all synchronous although its flags request overlap.

XLA's scheduler makes them synchronous, without a message, where a program that overlaps would not
fit the device memory.
"""

from typing import Any

from jrl.checks import flag
from jrl.processes.agreement import is_main_process
from jrl.report.warnings import FewWarnings
from moe.execution import Execution
from sharding.folding import FoldedMesh
from sharding.overlap import is_synchronous

_WARNINGS = FewWarnings()
_CHECKED: set[tuple[Any, ...]] = set()
"""Static arguments of the programs that were looked at."""


def overlap_flags(execution: Execution) -> list[str]:
    """Flags of the settings that request overlap of communication with computation."""
    requested = {
        "expert_chunks": execution.expert_chunks > 1,
        "two_batch_overlap": execution.two_batch_overlap,
        "overlap_grad_reduce": execution.overlap_grad_reduce,
    }
    return [flag(name) for name, is_on in requested.items() if is_on]


def can_overlap(execution: Execution, mesh: FoldedMesh) -> bool:
    """True if overlap is requested on accelerators that communicate; a CPU runs its collectives one
    by one."""
    if mesh.layout.num_devices == 1 or mesh.platform in (None, "cpu"):
        return False
    return bool(overlap_flags(execution))


def warn_if_synchronous(program: Any, num_static: int, *args: Any) -> None:
    """Prints one line if overlap is requested and all collectives of an update are synchronous.

    It compiles the program once for each set of static arguments; the next call of `program` runs
    it.

    Args:
      program: jitted function of the update (`jrl.trainer.compiled`).
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
        "the update are synchronous. On a GPU its memory is too tight then: choose a smaller "
        "--micro-batch or --remat full, or leave out what overlaps.",
    )
