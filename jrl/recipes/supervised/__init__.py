"""Supervised learning from given completions."""
