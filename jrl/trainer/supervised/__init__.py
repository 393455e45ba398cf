"""Learning from conversations that are given: rows, a step, what is held out."""
