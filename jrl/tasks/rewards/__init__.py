"""Rewards of a user's own: called in worker processes, weighed, their failures counted."""
