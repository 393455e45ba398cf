"""Multi-turn tasks: an environment answers each turn of the policy."""
