"""Terminal output of an evaluation: its progress and its results."""
