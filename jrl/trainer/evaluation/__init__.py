"""Evaluation of a policy or a critic on held-out prompts."""
