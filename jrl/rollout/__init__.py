"""Completions sampled from the policy, with the log-probabilities they were sampled with."""
