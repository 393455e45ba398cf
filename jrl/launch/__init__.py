"""Launchers: one command that starts the processes of a run on many machines."""
