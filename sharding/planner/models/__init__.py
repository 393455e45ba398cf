"""Networks as the planner knows them: sizes, where they come from, and what a device holds."""
