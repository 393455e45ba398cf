"""``python -m jrl.faults simulate FILE``: a simulated fleet as a file that ``replay`` reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from jrl.config.numbers import check_seed
from jrl.faults.simulate.incident import simulate
from jrl.faults.simulate.metrics import PRODUCTION
from jrl.faults.simulate.settings import Settings


@dataclass(frozen=True)
class SimulateOptions:
    """Simulated fleet to write."""

    out: tyro.conf.Positional[str]
    """The file (.npz) to write."""
    machines: int | None = 32
    """Number of machines; None samples 4 to 1,500."""
    seconds: int = 900
    """Length of the record."""
    metrics: tuple[str, ...] = PRODUCTION
    """Metrics to record."""
    clean: bool = False
    """Simulate no fault."""
    fault: str | None = None
    """The fault, such as "PCIe downgrading"; None samples one from the published mix."""
    difficulty: float = 1.0
    """Divides how far the fault moves the metrics."""
    seed: int = 0
    """The same seed gives the same fleet."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = tyro.cli(SimulateOptions, prog="python -m jrl.faults simulate", args=arguments)
    check_seed(request.seed)
    settings = Settings(
        machines=request.machines,
        seconds=request.seconds,
        metrics=request.metrics,
        faulty=not request.clean,
        fault=request.fault,
        difficulty=request.difficulty,
    )
    incident = simulate(settings, request.seed)
    incident.fleet.save(request.out)
    print(f"{request.out}: {len(incident.fleet.machines)} machines for {request.seconds} s")
    if incident.machine is None:
        print("nothing fails")
    else:
        begin = incident.start - incident.fleet.start
        end = incident.end - incident.fleet.start
        shown = ", ".join(incident.shown) or "none of the recorded metrics"
        print(f"{incident.fault} on {incident.machine} from {begin:.0f} to {end:.0f} s, in {shown}")
    return 0
