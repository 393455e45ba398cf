"""Benchmark of detectors: their precision, recall and cost."""
