"""Costs of communication: what devices and links do, and the bytes and seconds of a collective.

Run time chooses a token dispatcher by them, and `moe.planner` a layout.
"""
