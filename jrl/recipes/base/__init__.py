"""What recipes are made of: hyperparameters, hooks, batches, corrections."""
