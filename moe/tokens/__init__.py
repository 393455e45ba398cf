"""Batches in the form that the network runs: packing, zig-zag order, and alignment of outputs to
tokens."""
