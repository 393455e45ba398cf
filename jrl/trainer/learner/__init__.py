"""Learners: weights with their optimizer state, objectives and the update."""
