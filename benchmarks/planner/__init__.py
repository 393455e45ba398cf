"""Evidence for the planner, fits of its numbers to it, and plans of servers."""
