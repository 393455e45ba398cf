"""Planner of disaggregated serving of MoE models: attention and experts on separate devices."""
