"""Base classes of recipes: hyperparameters, hooks, batches and mismatch corrections."""
