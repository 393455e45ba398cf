"""Adapters of a run beside the files that they come from and go to."""
