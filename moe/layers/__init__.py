"""Blocks, stacks of layers (scanned or unrolled), and two-batch overlap."""
