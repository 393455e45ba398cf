"""Simulated fleets, second by second: the period of training steps, benign disturbances, faults."""

from jrl.faults.simulate.incident import Incident, simulate
from jrl.faults.simulate.metrics import METRICS, PRODUCTION, Metric
from jrl.faults.simulate.mix import FAULTS, MIX, Fault
from jrl.faults.simulate.settings import Settings

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
