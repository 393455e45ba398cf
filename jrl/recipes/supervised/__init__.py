"""Learning from completions that are given."""
