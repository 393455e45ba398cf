"""Processes that check answers, and are killed where they take too long."""
