"""Simulated fleets, second by second: the period of training steps, benign disturbances, faults."""

from benchmarks.faults.simulate.incident import Incident, simulate
from benchmarks.faults.simulate.settings import (
    FAULTS,
    METRICS,
    MIX,
    PRODUCTION,
    Fault,
    Metric,
    Settings,
)

__all__ = [
    "FAULTS",
    "METRICS",
    "MIX",
    "PRODUCTION",
    "Fault",
    "Incident",
    "Metric",
    "Settings",
    "simulate",
]
