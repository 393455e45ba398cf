"""Parallel map over processes, each with a JAX runtime of its own.

Threads would share one CPU backend, and computations started from more threads than it has can
deadlock.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
Job = TypeVar("Job")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], processes: int | None = None
) -> Iterator[Result]:
    """Yields results in the order of the jobs, as they complete.

    Args:
      function: a function of a module, or a `partial` of one, for it goes to the processes.
      jobs: its arguments.
      processes: how many; one works in this process, None takes one per core.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} must be at least 1.")
    count = min(processes or os.cpu_count() or 1, max(1, len(jobs)))
    if count == 1:
        yield from map(function, jobs)
        return
    # A forked process would inherit locks that JAX's threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_one_thread) as pool:
        yield from pool.map(function, jobs)


def _one_thread() -> None:
    """Sets XLA to one thread; called before the first use of JAX, whose backend reads the flag."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
