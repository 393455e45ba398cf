"""The benchmark of one accelerator: `python -m benchmarks.gpu`."""
