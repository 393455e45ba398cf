"""Overlap of a training step, read off the program that the compiler of absent devices schedules.

    python -m benchmarks.absent schedule
    python -m benchmarks.absent schedule --only v5p

A row is a step of GRPO with some of the flags that let communication overlap with computation. The
layers are few and scanned: a deeper network runs the same loops for longer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent.programs import compile_step
from benchmarks.absent.rows import Figures, folder_of, reason
from benchmarks.absent.selection import Selection
from benchmarks.absent.steps import KERNELS, Step
from benchmarks.gpu.shapes import QWEN3_A3B

FOUR_LAYERS = QWEN3_A3B | {"num_layers": 4}
NO_FLAG = "without a flag"
FLAGS: dict[str, dict[str, Any]] = {
    NO_FLAG: {},
    "--expert-chunks 2": {"expert_chunks": 2},
    "--two-batch-overlap": {"two_batch_overlap": True},
    "--overlap-grad-reduce": {"overlap_grad_reduce": True},
    "all three": {"expert_chunks": 2, "two_batch_overlap": True, "overlap_grad_reduce": True},
}
"""Flags of the rows, as fields of `moe.execution.Execution`."""


class Scheduled(NamedTuple):
    """A training step whose schedule is read.

    Attributes:
      step: on its devices, without the flags.
      flags: of `FLAGS`.
      hardware: of `sharding.costs.hardware.HARDWARE`.
    """

    step: Step
    flags: str
    hardware: str


def _steps() -> Iterator[Scheduled]:
    title = "Qwen3-30B-A3B, 4 layers"
    gpus = Step("h100", "1x1x8", "dp8 / ep8", title, FOUR_LAYERS, KERNELS | {"scan_layers": True})
    megablox = {"experts": "megablox", "remat": "selective", "buffer_factor": 1.5}
    tpus = Step(*("v5p", None, "dp8 / ep8", title, FOUR_LAYERS), megablox | {"scan_layers": True})
    for flags in FLAGS:
        yield Scheduled(gpus, flags, "h100")
    yield Scheduled(tpus, NO_FLAG, "v5p")


SCHEDULED = tuple(_steps())


def schedules(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each step and choice of flags; quick: one, on GPUs."""
    for one in SCHEDULED[:1] if quick and not selection.names else SCHEDULED:
        step = one.step
        label = f"{step.label} {one.flags}"
        if not selection.takes(label):
            continue
        about = {"device": step.device, "layout": step.layout, "program": step.title}
        about |= {"flags": one.flags}
        step = step._replace(execution=step.execution | FLAGS[one.flags])
        try:
            program = compile_step(step, folder_of(keep, label), reads_kernels=False)
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        text = program.text
        yield (
            about
            | {"seconds": program.seconds, "temporaries": program.temporaries}
            | overlap(text, one.hardware)
        )


def overlap(text: str, hardware: str) -> Figures:
    """Figures of the overlap of a scheduled program."""
    from benchmarks.absent.timeline import timeline
    from sharding.costs.hardware import HARDWARE

    found = timeline(text, HARDWARE[hardware])
    several = [one for one in found.collectives if one.collective.devices > 1]
    runs = sum(one.times for one in several)
    asynchronous = sum(one.times for one in several if one.collective.is_asynchronous)
    # Those of a loop: a deeper network has more of them, and of the others as many.
    repeated = [one for one in several if one.times > 1]
    return {
        "collectives": runs,
        "asynchronous": asynchronous,
        "communication": found.communication,
        "exposed": found.exposed,
        "communication_of_layers": sum(one.times * one.seconds for one in repeated),
        "exposed_of_layers": sum(one.times * one.exposed for one in repeated),
        "step": found.seconds,
        "flops": found.work.flops,
        "bytes": found.work.bytes,
        "each": found.rows(),
    }
