"""From the rewards that follow each token, against a baseline."""
