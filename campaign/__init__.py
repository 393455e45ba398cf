"""Runs of random settings and with random faults, compared with plain runs."""
