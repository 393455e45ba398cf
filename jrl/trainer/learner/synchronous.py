"""Warning of an update whose settings request overlap of communication with computation, where the
compiler overlaps nothing."""

from typing import Any

from jrl.checks import flag
from jrl.processes.agreement import is_main_process
from jrl.report.warnings import FewWarnings
from moe.execution import Execution
from sharding.overlap import is_synchronous

_WARNINGS = FewWarnings()
_CHECKED: set[tuple[Any, ...]] = set()
"""Static arguments of the programs that were looked at."""


def overlap_flags(execution: Execution) -> list[str]:
    """Flags of the settings that request overlap of communication with computation."""
    requested = {
        "expert_chunks": execution.num_chunks > 1,
        "two_batch_overlap": execution.two_batch_overlap,
        "overlap_grad_reduce": execution.overlap_grad_reduce,
    }
    return [flag(name) for name, is_on in requested.items() if is_on]


def warn_if_synchronous(program: Any, num_static: int, *args: Any) -> None:
    """Prints one line if overlap is requested and all collectives of an update are synchronous.

    It compiles `program`, a jitted function, once for each set of its static arguments, the first
    `num_static`, which begin with the objective; the next call of the program runs it.
    """
    objective = args[0]
    flags, mesh = overlap_flags(objective.config.execution), objective.mesh
    if not flags or args[:num_static] in _CHECKED:
        return
    # A CPU runs its collectives one by one, and a single device has none.
    if mesh.layout.num_devices == 1 or mesh.platform in (None, "cpu"):
        return
    _CHECKED.add(args[:num_static])
    text = program.lower(*args).compile().as_text()
    if text is None or not is_synchronous(text) or not is_main_process():
        return
    _WARNINGS.warn(
        "synchronous",
        f"{', '.join(flags)}: the compiler overlaps nothing, all collectives of "
        "the update are synchronous. On a GPU its memory is too tight then: choose a smaller "
        "--micro-batch or --remat full, or leave out what overlaps.",
    )
