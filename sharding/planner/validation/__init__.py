"""Validation: published measurements and what the planner predicts for them."""
