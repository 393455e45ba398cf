"""Blocks, stacks of layers (scanned or unrolled), and pipeline chunks."""
