"""Settings of simulated fleets."""

from dataclasses import dataclass

from jrl.faults.simulate.metrics import METRICS, PRODUCTION
from jrl.faults.simulate.mix import MIX


@dataclass(frozen=True)
class Settings:
    """Distribution of simulated fleets; a seed samples one of them.

    Attributes:
      machines: how many, at least 2; None samples it per fleet, log-uniform in 4 to 1,500.
      seconds: length of the record, at least 60.
      metrics: recorded metrics, names of `METRICS`.
      faulty: true if one machine fails.
      fault: the fault; None samples one from the published mix.
      difficulty: divides how far a fault moves the metrics, above 0.
      disturbances: scales how often readings are off, metrics burst and transient slowdowns come,
        and how many healthy machines differ from the others for good, at least 0.
      offsets: scales the last of these once more, at least 0.
      heavy_tails: true if rates of events (pause frames, notifications of congestion) vary by
        factors from one second to the next, as those of a switch under load do.
      drifts: share of healthy machines that one metric of drifts away, by up to a quarter of its
        level over a record of 15 minutes, in [0, 1].
      period: seconds between two samples, at least 1; each is the mean over them.
      missing: share of single samples that are lost, in [0, 1).
      outages: share of machines that report nothing for 5 to 40 seconds, in [0, 1].
      clock_skew: standard deviation of the machines' clocks, in seconds, at least 0.
    """

    machines: int | None = None
    seconds: int = 900
    metrics: tuple[str, ...] = PRODUCTION
    faulty: bool = True
    fault: str | None = None
    difficulty: float | int = 1.0
    disturbances: float | int = 1.0
    offsets: float | int = 1.0
    heavy_tails: bool = False
    drifts: float | int = 0.0
    period: int = 1
    missing: float | int = 0.01
    outages: float | int = 0.03
    clock_skew: float | int = 0.5

    def __post_init__(self):
        if self.machines is not None and self.machines < 2:
            raise ValueError(f"machines={self.machines} must be at least 2.")
        if self.seconds < 60:
            raise ValueError(f"seconds={self.seconds} must be at least 60.")
        if not 1 <= self.period <= self.seconds // 2:
            raise ValueError(f"period={self.period} must lie in 1..{self.seconds // 2} seconds.")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or not self.metrics:
            raise ValueError(
                f"metrics={self.metrics!r} must name one or more of {', '.join(METRICS)}."
            )
        if self.fault is not None and self.fault not in MIX:
            raise ValueError(f"fault={self.fault!r} is unknown: choose among {', '.join(MIX)}.")
        if not self.difficulty > 0:
            raise ValueError(f"difficulty={self.difficulty} must be above 0.")
        for name in ("disturbances", "offsets", "clock_skew"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0.")
        for name, most in (("missing", 0.99), ("outages", 1.0), ("drifts", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, {most}].")
