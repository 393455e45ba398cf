"""Vectors of jrl/losses/value."""

VECTORS = []
