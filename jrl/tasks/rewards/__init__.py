"""Custom reward functions: called in worker processes, weighted, their failures counted."""
