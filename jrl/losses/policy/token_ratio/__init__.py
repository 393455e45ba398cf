"""Losses with a ratio for each token."""
