"""State, one update, the loop, and everything a run leaves behind."""
