"""Gated DeltaNet: linear attention with a state of a fixed size in the place of keys and values."""
