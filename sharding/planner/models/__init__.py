"""Models of the planner: sizes, their sources, and the weights of a device."""
