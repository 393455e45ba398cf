"""Looking at runs: attached to training, from outside, and afterwards."""
