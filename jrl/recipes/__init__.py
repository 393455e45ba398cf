"""One file per paper: its hyperparameter table as code, and what it does to a batch."""
