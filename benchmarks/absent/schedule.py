"""Overlap of updates with the flags that let communication overlap with computation, read off the
programs that the compilers of absent devices schedule. Those without a flag are among `steps`.

    python -m benchmarks.absent schedule
    python -m benchmarks.absent schedule --only 235B
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent.programs import compile_step
from benchmarks.absent.rows import Figures, folder_of, reason
from benchmarks.absent.selection import Selection
from benchmarks.absent.steps import ON_64, SELECTED, Step
from benchmarks.absent.timeline import overlap

ONE_CHUNK, TWO_BATCHES = "--expert-chunks 1", "--two-batch-overlap"
REDUCTIONS, ALL = "--expert-chunks 1 --overlap-grad-reduce", "all three"
FLAGS: dict[str, dict[str, Any]] = {
    ONE_CHUNK: {"expert_chunks": 1},
    TWO_BATCHES: {"two_batch_overlap": True},
    REDUCTIONS: {"expert_chunks": 1, "overlap_grad_reduce": True},
    ALL: {"expert_chunks": 2, "two_batch_overlap": True, "overlap_grad_reduce": True},
}
"""Flags of the rows, as fields of `moe.execution.Execution`."""
MORE_MEMORY = {"xla_gpu_memory_limit_slop_factor": 130}
"""Percent of the memory that the compiler's scheduler takes into account, 95 by default, of 80% of
the device's."""
WITH_MORE_MEMORY = "memory factor 130"


class Scheduled(NamedTuple):
    """An update whose schedule is read.

    Attributes:
      step: without the flags.
      flags: of `FLAGS`, or none.
      options: of the compiler.
    """

    step: Step
    flags: str
    options: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """Flags and options."""
        named = [self.flags] if self.flags else []
        return ", ".join([*named, WITH_MORE_MEMORY] if self.options else named)


SCHEDULED = (
    *(Scheduled(SELECTED, flags) for flags in FLAGS),
    Scheduled(SELECTED, "", MORE_MEMORY),
    Scheduled(SELECTED, ONE_CHUNK, MORE_MEMORY),
    # A device has one row of it, which has no halves.
    Scheduled(ON_64, ONE_CHUNK),
)


def schedules(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each update and choice of flags; quick: one."""
    for one in SCHEDULED[:1] if quick and not selection.names else SCHEDULED:
        step = one.step
        label = f"{step.label} {one.title}"
        if not selection.takes(label):
            continue
        about = {"device": step.device, "layout": step.layout, "program": step.title}
        about |= {"flags": one.title}
        execution = step.execution | FLAGS.get(one.flags, {})
        step = step._replace(execution=execution, options=one.options)
        try:
            program = compile_step(step, folder_of(keep, label), reads_kernels=False)
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        yield (
            about
            | {"seconds": program.seconds, "temporaries": program.temporaries}
            | overlap(program.text, step.device)
        )
