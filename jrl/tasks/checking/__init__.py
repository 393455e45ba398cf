"""Checks of verifiers and rewards: answers that a policy could game them with."""
