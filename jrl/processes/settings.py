"""Settings of the monitoring of a run's processes."""

import re
from dataclasses import dataclass
from typing import ClassVar

from jrl.setting import setting

MAX_PORT = 2**16 - 1
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class MonitoringSettings:
    """Metrics, health check, deadlines and profiles."""

    CHANGEABLE: ClassVar[bool] = True

    metrics_port: int | None = setting(None, minimum=1, maximum=MAX_PORT)
    """Serve Prometheus metrics (/metrics) and a health check (/health) of the run on this port of
    every machine, for example 9100, at the metrics address; further processes of a machine take the
    next ports. None serves nothing."""
    metrics_address: str = LOCALHOST
    """Address that the metrics port listens on. By default only programs of the same machine reach
    it; 0.0.0.0 listens on all networks."""
    step_deadline: float | None = setting(None, above=0)
    """Seconds from the end of a step to the end of the next, after which the health check fails;
    None is none. The first step, which compiles, has none."""
    hang_deadline: float | None = setting(None, minimum=0)
    """Seconds that a phase (rollout, reward, update, ...) may go with no sign of progress. Then
    the process that hangs is named and stacks are written to the run folder, and after 30 s more
    (at most the deadline) the run ends. It is six times as long for checkpoints, and twelve times
    for compilations and for the first of each phase. 0 watches nothing. None is 300; a run of one
    process is then named but not ended."""
    profile: str | None = None
    """Record these steps with JAX's profiler, for example 10:13 for steps 10, 11 and 12: the first
    included, the last not. The trace is in profiles/ of the run folder, its largest operations in
    report.html."""
    profile_steps: int = setting(3, minimum=1)
    """Number of steps that a process records after the signal SIGUSR1."""

    @property
    def profiled_steps(self) -> range:
        """Steps of `profile`."""
        if self.profile is None:
            return range(0)
        matched = re.fullmatch(r"([0-9]+):([0-9]+)", self.profile)
        steps = range(int(matched[1]), int(matched[2])) if matched else range(0)
        if not steps or steps.start < 1:
            raise ValueError(
                f"profile={self.profile!r} must be A:B with 1 <= A < B, for example 10:13 for "
                "steps 10, 11 and 12."
            )
        return steps

    def __post_init__(self):
        _ = self.profiled_steps  # raises its error
        if self.metrics_address != LOCALHOST and self.metrics_port is None:
            raise ValueError(f"metrics_address={self.metrics_address!r} needs --metrics-port.")
        if self.step_deadline is not None and self.metrics_port is None:
            raise ValueError(
                f"step_deadline={self.step_deadline} is of the health check: give --metrics-port."
            )
