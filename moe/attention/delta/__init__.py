"""Gated DeltaNet: linear attention whose state has a fixed size, instead of a KV cache."""
