"""Losses that hold back the few tokens through which entropy collapses."""
