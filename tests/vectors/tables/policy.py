"""Vectors of jrl/losses/policy."""

VECTORS = []
