"""Rollouts: completions sampled from the policy, with their sampling log-probabilities."""
