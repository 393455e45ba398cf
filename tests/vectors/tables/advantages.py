"""Vectors of jrl/losses/advantages."""

VECTORS = []
