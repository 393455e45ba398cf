"""Benchmark of detectors: how often each names the right machine, and at what cost."""
