"""Planner: the best parallel layout of a model on a cluster, by arithmetic of memory and time.

Nothing here runs on a device. Its command is ``python -m moe.planner MODEL --hardware h100x64``.
"""
