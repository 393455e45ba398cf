"""Validation of the planner: published figures, papers' formulas, compiled programs."""
