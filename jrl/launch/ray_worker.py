"""Training program in a worker of Ray Train, after Ray has connected the processes."""

import os
from collections.abc import Mapping
from typing import Any

from jrl.processes.coordinator import all_arrive
from jrl.processes.supervisor import Supervisor

END_SECONDS = 30.0
"""Seconds that a process which rejects its arguments waits for the others to reject them too."""


class RaySupervisor(Supervisor):
    """Reports steps to Ray Train, and asks it whether a node is about to be taken back."""

    def __init__(self) -> None:
        self._saved_for: frozenset[str] = frozenset()

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        import ray.train

        ray.train.report({"step": step, **metrics})
        info = ray.train.get_preemption_info()
        if info is None:
            return False
        # One checkpoint for each node: training goes on until Ray restarts it.
        nodes = frozenset(info.preempted_node_ids)
        is_new = not nodes <= self._saved_for
        self._saved_for |= nodes
        return is_new


def train(config: Mapping[str, Any]) -> int:
    """Trains in this process, and returns the exit status; RuntimeError if the run failed.

    Ray restarts all workers if one raises. Status 2, wrong input, comes again at every restart, and
    is returned if all processes have it.
    """
    os.chdir(config["working_directory"])
    from jrl import train as program

    status = program.main(config["arguments"], RaySupervisor())
    if status == 0 or (status == 2 and all_arrive("wrong input", END_SECONDS)):
        return status
    raise RuntimeError(f"the training program ended with status {status}")
