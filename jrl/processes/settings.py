"""Settings of the monitoring of a run's processes."""

from dataclasses import dataclass
from typing import ClassVar

from jrl.setting import setting

MAX_PORT = 2**16 - 1
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class MonitoringSettings:
    """Metrics, health check and deadlines."""

    CHANGEABLE: ClassVar[bool] = True

    metrics_port: int | None = setting(None, minimum=1, maximum=MAX_PORT)
    """Serve Prometheus metrics (/metrics) and a health check (/health) of the run on this port of
    every machine; further processes of a machine take the next ports. None serves nothing."""
    metrics_address: str = LOCALHOST
    """Address that metrics are served at. By default only programs of the same machine reach it;
    0.0.0.0 listens on all networks."""
    step_deadline: float | None = setting(None, above=0)
    """Seconds from the end of a step to that of the next, after which the health check fails; None
    is none. The first step, which compiles, has none."""
    hang_deadline: float | None = setting(None, minimum=0)
    """Seconds that a phase (rollout, reward, update, ...) may take without a sign of progress. Then
    the process that hangs is named and stacks are written to the run folder, and after 30 s more
    (at most the deadline) the run ends. It is six times as long for checkpoints, and twelve times
    for compilations and for the first of each phase. 0 watches nothing. None is 300; a run of one
    process is then named but not ended."""

    def __post_init__(self):
        if self.metrics_address != LOCALHOST and self.metrics_port is None:
            raise ValueError(f"metrics_address={self.metrics_address!r} needs --metrics-port.")
        if self.step_deadline is not None and self.metrics_port is None:
            raise ValueError(
                f"step_deadline={self.step_deadline} is of the health check: give --metrics-port."
            )
