"""Parts of the report: what each compiles for, and its rows."""

from benchmarks.absent.report import EXCHANGES, KERNELS, LAUNCHES, SCHEDULE, STEPS
from benchmarks.absent.workers import Rows

PARTS: dict[str, tuple[str, ...]] = {
    KERNELS: ("cuda",),
    STEPS: ("cuda", "tpu"),
    SCHEDULE: ("cuda", "tpu"),
    LAUNCHES: ("cuda",),
    EXCHANGES: ("cuda",),
}
"""Parts, and the platforms whose compilers each needs."""


def rows_of(part: str) -> Rows:
    """The rows of a part; imports JAX."""
    from benchmarks.absent import exchanges, launches, programs, rows, schedule

    return {
        KERNELS: rows.gpu_kernels,
        STEPS: programs.steps,
        SCHEDULE: schedule.schedules,
        LAUNCHES: launches.launches,
        EXCHANGES: exchanges.exchanges,
    }[part]
