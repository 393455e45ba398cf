"""Data collection of a step: one round, dynamic sampling, partial rollouts or asynchronous."""
