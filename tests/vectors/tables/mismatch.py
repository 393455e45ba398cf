"""Vectors of jrl/losses/mismatch."""

VECTORS = []
