"""The network in numbers: its arithmetic, and its sizes as a planner reads them."""
