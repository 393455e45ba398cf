"""Settings of fault detection in a run, and of what follows an alarm."""

from dataclasses import dataclass
from typing import ClassVar

from jrl.setting import setting

TELL, DRAIN = "tell", "drain"
"""Actions of `FaultSettings.on_fault`; any other text is a command."""


@dataclass(frozen=True)
class FaultSettings:
    """Fault detection and elastic training."""

    CHANGEABLE: ClassVar[bool] = True

    faults: bool = False
    """Sample each process once a second into faults/ of the run folder, for python -m jrl.faults
    watch, and raise an alarm if one deviates from the others. The numbers stay the same."""
    faults_continuity: float = setting(240.0, above=0)
    """Seconds for which a process has to stand out before an alarm names it."""
    faults_port: int | None = setting(None, minimum=1, maximum=2**16 - 1)
    """Serve the newest sample to Prometheus on this port of localhost, plus the number of the
    process; None serves nothing."""
    on_fault: str | None = None
    """Action at an alarm, in addition to the line that tells it: "tell" is none, "drain" saves a
    checkpoint and ends the run with status 75, for a restart without that machine, and any other
    text is a shell command, whose environment has JRL_FAULT_MACHINE, JRL_FAULT_METRIC,
    JRL_FAULT_START, JRL_FAULT_END (Unix times) and JRL_FAULT_LINE. None is tell."""
    drain_every: float = setting(3600.0, above=0)
    """Fewest seconds between two drains of the run; alarms in between are told."""
    min_processes: int | None = setting(None, minimum=1)
    """Elastic training: fewest processes with which the run continues, on a layout with a smaller
    dp, after a drain or a start with fewer devices than its layout has. If no layout is legal,
    alarms are told, and the start is an error. `elastic` of python -m jrl.launch sets it. None
    leaves the processes to the scheduler, and the layout as it is."""

    @property
    def fault_command(self) -> str | None:
        """Shell command for each alarm, if there is one."""
        return None if self.on_fault in (None, TELL, DRAIN) else self.on_fault

    def __post_init__(self):
        for name in ("faults_port", "on_fault"):
            if getattr(self, name) is not None and not self.faults:
                raise ValueError(f"{name}={getattr(self, name)!r} needs --faults.")
