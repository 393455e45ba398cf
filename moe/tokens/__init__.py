"""Batches in the form that the network runs: packing, sequences, and alignment of outputs to
tokens."""
