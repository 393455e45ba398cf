"""A policy or a critic on held-out prompts."""
