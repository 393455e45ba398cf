"""Counts of a network: its FLOPs, and its sizes as the planner reads them."""
