"""Fault detection on fleets of synchronous training: `python -m benchmarks.faults`."""
