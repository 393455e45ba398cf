"""Which layout for this model on this cluster, and why: memory and time in plain arithmetic.

Nothing here runs on a device. ``python -m sharding.planner MODEL --hardware h100x64`` asks.
"""
